// The "what if" of a lesson: below its cell, sliders ask Python in this browser (docs/whatif.py).
//
// Python is loaded when a reader asks for it, and not before: it has 13 MB.

import { make, Problem } from "../whatif/dom.js";
import { Python } from "../whatif/python.js";

const LIMIT = 60000; // ms of one answer: hundreds of requests on a phone
const BASE = new URL("../whatif/manifest.json", import.meta.url);
const name = location.pathname.split("/").at(-1).replace(/\.html$/, "");
const cell = [...document.querySelectorAll("div.cell")].find((each) => each.textContent.includes("sliders(what_if"));
const place = make("section", { className: "what-if", ariaLabel: "Change the numbers" });
const button = make("button", { type: "button", textContent: "Change the numbers: this page runs the book's own code" });
place.append(button);
cell.after(place);
button.onclick = start;

async function start() {
  button.disabled = true;
  button.textContent = "Python starts …";
  try {
    const manifest = await (await fetch(BASE)).json();
    const lesson = manifest.lessons[name];
    const python = new Python(manifest, BASE, { limit: LIMIT });
    const { controls, error } = await python.ask({ lesson });
    if (error) throw new Problem(error);
    const text = make("pre", { ariaLive: "polite" });
    const pictures = make("div", { tabIndex: 0 });
    const chosen = Object.fromEntries(controls.map(({ name, value }) => [name, value]));
    let busy = false, again = false;
    const show = async () => { // the newest choice; those in between are left out
      again = true;
      if (busy) return;
      busy = true;
      while (again) {
        again = false;
        try {
          const answer = await python.ask({ lesson, chosen });
          text.textContent = answer.error ?? answer.text;
          text.hidden = !text.textContent;
          pictures.innerHTML = (answer.pictures ?? []).join("");
          pictures.hidden = !answer.pictures?.length;
        } catch (problem) {
          text.textContent = problem.message;
          text.hidden = false;
        }
      }
      busy = false;
      place.dataset.shown = Number(place.dataset.shown ?? 0) + 1; // for tests
    };
    place.replaceChildren(...controls.map((control) => drawn(control, chosen, show)), text, pictures);
    await show();
  } catch (problem) {
    place.replaceChildren(make("p", { textContent: problem.message }));
  }
}

// A slider or a list, with its name and its value.
function drawn({ name, labels, value, ...range }, chosen, show) {
  const label = make("label", {});
  const input = labels ? make("select", {}) : make("input", { type: "range", ...range, value });
  if (labels) input.append(...labels.map((text, value) => make("option", { textContent: text, value })));
  input.value = value;
  const said = make("output", { textContent: labels ? "" : value });
  input.oninput = () => {
    chosen[name] = Number(input.value);
    if (!labels) said.textContent = input.value;
    show();
  };
  label.append(make("span", { textContent: name.replaceAll("_", " ") }), input, said);
  return label;
}
