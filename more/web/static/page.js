// What both pages do: ask the server that gave them, and say what is wrong.

import { get, Problem } from "./dom.js";

const KEY = "nano-sarathi-key"; // given once, it opens both pages

export const clock = () => performance.now() / 1000; // s
export const rest = (time) => new Promise((done) => setTimeout(done, time * 1000));

// An answer of the server. A Problem, if it refuses or is not there.
export async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const asked = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  const answer = await fetch(path, asked).catch(() => {
    throw new Problem("The server does not answer.");
  });
  get("key-box").hidden = answer.status !== 401;
  if (answer.ok) return answer;
  if (answer.status === 401) throw new Problem(key ? "This key is not the server's." : "The server asks for its key.");
  const said = await answer.json().catch(() => ({}));
  throw new Problem(said.error?.message ?? `The server says ${answer.status}.`);
}

// Write a text into an element, and what kind of text it is, for its looks.
export function tell(id, text, kind = "") {
  const element = get(id);
  if (element.textContent !== text) element.textContent = text;
  element.dataset.kind = kind;
}

// Show a problem, or that there is none any more.
export function complain(text = "") {
  get("problem").textContent = text;
  get("problem").hidden = !text;
}

// Choose from a list. It takes in what it has not, such as dynamic:512,256.
export function select(list, value) {
  list.value = value;
  if (list.selectedIndex < 0) list.append(new Option(value, value, false, true));
}

// A key that the reader gives is kept; `then` hears that there is one.
export function onKey(then) {
  get("key-box").onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, get("key").value);
    get("key").value = "";
    then();
  };
}

// A page that becomes dark, light or wider is drawn again.
export function onLook(draw) {
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
