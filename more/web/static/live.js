// The page: it reads /live/events into a Schedule, has it drawn, and sends what the buttons say.

import { get as $, make } from "./dom.js";
import { legend, Pictures } from "./draw.js";
import { ENOUGH, FACTOR, KEPT, LEAST, Schedule, seconds, whole } from "./schedule.js";

const FRAME = 1 / 30, CALM = 1; // s between two drawings; for those who want no motion
const WINDOWS = [0.2, 0.5, 1, 2, 5, 10, 20, KEPT]; // s: what the pictures may show
const SPOKEN = 3; // s between two sentences that are read aloud
const SILENCE = 15; // s after which a connection counts as dead
const MOST_TEXT = 20000; // letters of an answer that are kept
const KEY = "nano-sarathi-key";
// The demonstration: its policies, the seconds that it shows, and those between two steps.
const SHOWN = ["vllm_v0", "sarathi_serve"], WHOLE = 20, STEP = 3;

const schedule = new Schedule();
const pictures = new Pictures($("lanes"), $("rows"), $("tbt"));
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const narrow = window.matchMedia("(max-width: 600px)");
let shown = narrow.matches ? 5 : 10; // s; on a phone, chunks of 10 s would be too narrow
let paused = null; // a view that stands still: its schedule, when it was made, and its right edge
let asking = null; // the request of the prompt box, while it runs

const clock = () => performance.now() / 1000;
const rest = (time) => new Promise((done) => setTimeout(done, time * 1000));

// ------------------------------------------------------------------------------ the server

const PROBLEM = "The server refused it.";

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" }, key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  if (answer.status === 401) $("key-box").hidden = false;
  const said = await answer.json().catch(() => ({}));
  const error = new Error(said.error?.message ?? PROBLEM);
  error.status = answer.status;
  throw error;
}

// The data of server-sent events, one after the other.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Read what the engine does, for ever. A connection that breaks is opened again.
async function watch() {
  for (let wait = 0.5; ; wait = Math.min(2 * wait, 5)) {
    const hangUp = new AbortController();
    let silent = setTimeout(() => hangUp.abort(), SILENCE * 1000), why = "";
    try {
      for await (const data of events(await call("/live/events", null, hangUp.signal))) {
        clearTimeout(silent);
        silent = setTimeout(() => hangUp.abort(), SILENCE * 1000);
        take(JSON.parse(data));
        wait = 0.5;
      }
    } catch (error) {
      why = error.status ? ` ${error.message}.` : "";
    }
    clearTimeout(silent);
    connected(false, `Disconnected.${why} Trying again ...`);
    await Promise.race([rest(wait), keyGiven()]);
  }
}

function take(news) {
  const now = clock();
  for (const event of news) {
    schedule.take(event, now);
    if (event.type === "snapshot") introduce(event);
    if (event.type === "switched") showPolicy();
    if (event.type === "chats") showChats();
    if (event.type === "failed") complain(`The engine failed and was restarted: ${event.error}`);
  }
  schedule.prune();
}

function connected(yes, text) {
  $("connection").dataset.state = yes ? "on" : "off";
  $("connection").textContent = text;
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// Send what a button says; tell what is wrong with it.
async function send(path, body) {
  complain("");
  try {
    return await call(path, body);
  } catch (error) {
    complain(error.status ? error.message : "The server does not answer.");
  }
}

// ------------------------------------------------------------------------------ what is said

function introduce(snapshot) {
  connected(true, "Connected");
  $("key-box").hidden = true;
  const where = snapshot.description.split(",")[0];
  $("source").textContent = snapshot.priced ? "predicted" : "measured";
  $("source").dataset.priced = snapshot.priced;
  $("description").textContent = snapshot.priced
    ? `${where}: the cost model's times, in real time. No model runs here.` +
      (snapshot.guess ? ` Note: ${snapshot.guess}.` : "")
    : `${snapshot.description}: these times are this machine's.`;
  $("placeholder").hidden = !snapshot.priced;
  $("policy").replaceChildren(...snapshot.policies.map((name) => new Option(name, name)));
  showPolicy();
  showChats();
  limit($("long-tokens"), snapshot.longest, snapshot.long);
  limit($("burst-count"), snapshot.most);
  limit($("chat-count"), Math.min(snapshot.most, snapshot.max_batch_size),
    Math.min(8, Math.max(1, snapshot.max_batch_size - 1))); // a slot is left for the long prompt
  limit($("max-tokens"), snapshot.max_length);
}

// The most that a number may be; `usual` is set where the reader has set nothing.
function limit(input, most, usual) {
  input.max = most;
  if (usual && !input.dataset.own) input.value = usual;
  if (input.valueAsNumber > most) input.value = most;
}

function showPolicy() {
  const { policy, chunk_size: size } = schedule.state, select = $("policy");
  if (![...select.options].some((option) => option.value === policy)) {
    select.append(new Option(policy, policy)); // one with an option, such as dynamic:512,256
  }
  select.value = policy;
  $("chunk").value = size;
  document.body.dataset.policy = policy;
}

function showChats() {
  const run = schedule.state.chats > 0;
  $("chats").dataset.on = run;
  $("chats").textContent = run ? "Stop the chats" : "Start chats";
}

let spoken = { text: "", kind: "", at: -SPOKEN };

function say(now, t) {
  const off = $("connection").dataset.state === "off";
  const { kind, text } = off ? { kind: "off", text: "Not connected to the engine." }
    : schedule.sentence(t);
  $("sentence").dataset.kind = kind;
  if ($("sentence").textContent !== text) $("sentence").textContent = text;
  const told = kind !== spoken.kind || ["froze", "smooth"].includes(kind) && text !== spoken.text;
  if (told && now - spoken.at > SPOKEN) {
    spoken = { kind, text, at: now };
    $("spoken").textContent = text;
  }
}

function showNumbers() {
  const { waiting, running, held, capacity, max_batch_size: slots } = schedule.state;
  const set = (id, text) => {
    if ($(id).textContent !== text) $(id).textContent = text;
  };
  set("waiting", whole(waiting ?? 0));
  set("running", `${whole(running ?? 0)} of ${slots ?? 0}`);
  set("held", whole(held ?? 0) + (capacity ? ` of ${whole(capacity)}` : ""));
  const { policy, budget } = schedule.state;
  set("budget", budget ? `token budget C = ${budget}`
    : budget === null ? `${policy} takes whole prompts: no token budget` : "");
  const pace = schedule.pace();
  set("median", running && pace ? seconds(pace) : "none");
  $("slo").placeholder = schedule.median === null ? ""
    : `${Number((schedule.slo * 1000).toPrecision(3))}`;
  const rows = [...schedule.tallies.values()].map(({ policy, c, gaps, stalls, longest }) => [policy,
    c ?? "none", whole(gaps), schedule.slo === null ? "no SLO" : whole(stalls), seconds(longest)]);
  const text = JSON.stringify(rows);
  if ($("stalls").dataset.text === text) return;
  $("stalls").dataset.text = text;
  $("stalls").replaceChildren(...rows.map(tableRow));
}

function tableRow([policy, ...cells]) {
  const head = make("th", { scope: "row", textContent: policy });
  const row = make("tr", {}, head, ...cells.map((textContent) => make("td", { textContent })));
  Object.assign(row.dataset, { policy, stalls: cells[2] });
  return row;
}

let drawn = -1;

function frame() {
  const now = clock();
  if (now - drawn >= (calm.matches ? CALM : FRAME)) {
    drawn = now;
    const t = schedule.time(now), { still, end, to } = paused ?? { still: schedule, end: t, to: t };
    pictures.draw(still, to - shown, to, end);
    say(now, t);
    showNumbers();
  }
  requestAnimationFrame(frame);
}

// ------------------------------------------------------------------------------ the view

function pause(yes) {
  const t = schedule.time(clock());
  paused = yes ? { still: schedule.still(), end: t, to: t } : null;
  $("pause").dataset.on = yes;
  $("pause").textContent = yes ? "Go on" : "Pause";
}

function move(share) {
  if (!paused && share > 0) return; // nothing is later than now
  if (!paused) pause(true);
  paused.to = Math.max(Math.min(paused.to + share * shown, paused.end), paused.end - KEPT);
}

// Show less time, or more. What stands still keeps the moment at `place` (0: left, 1: right).
function zoom(step, place = 0.5) {
  const next = WINDOWS.indexOf(shown) + step, before = shown;
  shown = WINDOWS[Math.max(0, Math.min(next, WINDOWS.length - 1))];
  $("seconds").textContent = `${shown} s`;
  if (paused) paused.to = Math.min(paused.to - (1 - place) * (before - shown), paused.end);
}

const KEYS = {
  " ": () => pause(!paused), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25),
  "+": () => zoom(-1), "=": () => zoom(-1), "-": () => zoom(1),
};

$("lanes").addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const id of ["lanes", "rows", "tbt"]) {
  $(id).addEventListener("click", (event) => {
    if (!paused) pause(true);
    zoom(-1, pictures.share(event.offsetX));
  });
}
$("pause").addEventListener("click", KEYS[" "]);
$("back").addEventListener("click", KEYS.ArrowLeft);
$("forward").addEventListener("click", KEYS.ArrowRight);
$("zoom-in").addEventListener("click", KEYS["+"]);
$("zoom-out").addEventListener("click", KEYS["-"]);
$("anew").addEventListener("click", () => schedule.countAnew());
$("slo").addEventListener("change", () => {
  if (!$("slo").reportValidity()) return;
  const given = $("slo").valueAsNumber; // not a number: the page's own SLO
  for (const each of [schedule, paused?.still]) each?.setSLO(given > 0 ? given / 1000 : null);
});

// ------------------------------------------------------------------------------ the buttons

const number = (id) => $(id).valueAsNumber;

for (const id of ["chat-count", "long-tokens", "burst-count"]) {
  $(id).addEventListener("change", () => ($(id).dataset.own = "yes"));
}
// Throw in what the button says, and as much of it as its number says.
function throwIn(kind, name, id) {
  if ($(id).value || $(id).reportValidity()) send("/live/throw", { kind, [name]: number(id) });
}

const chat = () => throwIn("chats", "count", "chat-count");
$("chats").addEventListener("click", () =>
  schedule.state.chats ? send("/live/throw", { kind: "chats", count: 0 }) : chat());
$("chat-count").addEventListener("change", () => schedule.state.chats && chat());
$("long").addEventListener("click", () => throwIn("long", "tokens", "long-tokens"));
$("burst").addEventListener("click", () => throwIn("burst", "count", "burst-count"));
$("switch").addEventListener("submit", (event) => {
  event.preventDefault();
  send("/live/policy", { policy: $("policy").value, chunk_size: number("chunk") });
});

// ------------------------------------------------------------------------------ the demonstration

let showing = null; // what ends it

// The same chats and the same long prompt under one policy after the other. Then the pictures stop.
async function show() {
  const mine = new Error("stopped");
  const goOn = (yes) => {
    if (!yes || showing !== mine) throw mine;
  };
  const ask = async (path, body) => {
    const answer = await send(path, body);
    goOn(answer);
    return answer.json();
  };
  const until = async (ready) => {
    while (!ready()) goOn(!(await rest(0.1)));
    goOn(!(await rest(STEP)));
  };
  showing = mine;
  $("show").dataset.on = true;
  try {
    pause(false);
    zoom(WINDOWS.indexOf(WHOLE) - WINDOWS.indexOf(shown));
    schedule.countAnew();
    for (const policy of SHOWN) {
      await ask("/live/policy", { policy, chunk_size: number("chunk") });
      await ask("/live/throw", { kind: "chats", count: number("chat-count") });
      await until(() => schedule.slo !== null);
      const { ids } = await ask("/live/throw", { kind: "long", tokens: number("long-tokens") });
      await until(() => schedule.iterations.some(({ chunks }) =>
        chunks.some(([id, , , , isLast]) => id === ids[0] && isLast)));
    }
    pause(true);
    schedule.tellAll();
  } catch (error) {
    if (error !== mine) throw error;
  }
  if (showing === mine) endShow();
}

function endShow() {
  showing = null;
  $("show").dataset.on = false;
  send("/live/throw", { kind: "chats", count: 0 });
}

$("show").addEventListener("click", () => (showing ? endShow() : show()));
window.addEventListener("hashchange", showFromLink);

// The link to it shows it once.
async function showFromLink() {
  if (location.hash !== "#show") return;
  history.replaceState(null, "", location.pathname);
  while (!schedule.state.policies) await rest(0.1);
  show();
}

let chats;  // whether the model has a chat template

// The stream of a prompt's answer: of a chat, or of a text that the model continues.
function answerTo(prompt, signal) {
  const [path, what] = chats ? ["chat/", { messages: [{ role: "user", content: prompt }] }]
    : ["", { prompt }];
  const body = { max_tokens: number("max-tokens"), stream: true, ...what };
  return call(`/v1/${path}completions`, body, signal);
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  $("send").disabled = !($("stop").disabled = false);
  $("text").textContent = "";
  $("asked").textContent = "Sent.";
  let first = null, reason = "";
  try {
    chats ??= (await (await call("/v1/models", null, asking.signal)).json()).data[0].chat;
    const begin = clock();
    for await (const data of events(await answerTo($("prompt").value, asking.signal))) {
      if (data === "[DONE]") break;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      first ??= clock() - begin;
      const [{ text, delta, finish_reason: why }] = part.choices;
      $("text").textContent = ($("text").textContent + (text ?? delta.content ?? "")).slice(-MOST_TEXT);
      reason = why ?? reason;
    }
    if (!reason) throw new Error("The server ended before the text did.");
    const kind = chats ? "Sent as a chat." : "Sent as a text to continue: there is no chat template.";
    $("asked").textContent = `${kind} First text after ${seconds(first ?? 0)}, the end ` +
      `("${reason}") after ${seconds(clock() - begin)}, as this page sees it.`;
  } catch (error) {
    $("asked").textContent = asking.signal.aborted ? "Stopped."
      : error instanceof TypeError ? "The server does not answer." : error.message; // no network
  }
  asking = null;
  $("send").disabled = !($("stop").disabled = true);
});
$("stop").addEventListener("click", () => asking?.abort());

let giveKey = () => {};
const keyGiven = () => new Promise((done) => (giveKey = done));

$("key-box").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  giveKey();
});

$("slo-note").textContent = "A stall is a gap between two tokens above the SLO. Without yours, " +
  `the SLO is ${FACTOR} times the median of the first ${ENOUGH} gaps, ${seconds(LEAST)} at least.`;
zoom(0);
legend($("legend"));
window.matchMedia("(prefers-color-scheme: dark)").onchange = () => legend($("legend"));
watch();
showFromLink();
requestAnimationFrame(frame);
