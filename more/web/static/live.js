// The live page: it reads /live/events into a Schedule, has it drawn, and sends what the buttons say.

import { get, make, Problem } from "./dom.js";
import { legend, Pictures } from "./draw.js";
import { call, clock, complain, onKey, onLook, rest, select, tell } from "./page.js";
import { ENOUGH, FACTOR, KEPT, LEAST, Schedule, seconds, whole } from "./schedule.js";

const FRAME = 1 / 30; // s between two drawings
const CALM = 1; // the same, for those who want no motion
const WINDOWS = [0.2, 0.5, 1, 2, 5, 10, 20, KEPT]; // s: what the pictures may show
const SPOKEN = 3; // s between two sentences that are read aloud
const SILENCE = 15; // s after which a connection counts as dead
const MOST_TEXT = 20000; // letters of an answer that are kept
const SHOWN = ["vllm_v0", "sarathi_serve"]; // the policies of the demonstration
const WHOLE = 20; // s that it shows
const STEP = 3; // s between two of its steps

const schedule = new Schedule();
const pictures = new Pictures({ lanes: get("lanes"), rows: get("rows"), tbt: get("tbt") });
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const narrow = window.matchMedia("(max-width: 600px)");
let shown = narrow.matches ? 5 : 10; // s; on a phone, chunks of 10 s would be too narrow
let paused = null; // a view that stands still: its schedule, when it was made, its latest and its right edge
const number = (id) => get(id).valueAsNumber;

// ------------------------------------------------------------------------------ the server

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

let tryNow = () => {}; // ends the wait before the next try to connect

// Read what the engine does, for ever. A connection that breaks is opened again.
async function watch() {
  for (let wait = 0.5; ; wait = Math.min(2 * wait, 5)) {
    const silence = new AbortController();
    const restart = () => setTimeout(() => silence.abort(), SILENCE * 1000);
    let timer = restart();
    let why = "";
    try {
      for await (const data of events(await call("/live/events", null, silence.signal))) {
        clearTimeout(timer);
        timer = restart();
        take(JSON.parse(data));
        wait = 0.5;
      }
    } catch (error) {
      why = error instanceof Problem ? ` ${error.message}` : "";
    }
    clearTimeout(timer);
    tell("connection", `Disconnected.${why} Trying again ...`, "off");
    await Promise.race([rest(wait), new Promise((done) => (tryNow = done))]);
  }
}

function take(news) {
  const now = clock();
  for (const event of news) {
    schedule.take(event, now);
    if (event.type === "snapshot") introduce();
    if (event.type === "switched") showPolicy();
    if (event.type === "chats") showChats();
    if (event.type === "failed") complain(`The engine failed and was restarted: ${event.error}`);
  }
  schedule.prune();
}

// Send what a button says. Nothing comes back if that goes wrong, and the page says why.
async function send(path, body) {
  complain();
  return call(path, body).catch((error) => complain(error.message));
}

// ------------------------------------------------------------------------------ what is said

function introduce() {
  const { state } = schedule;
  tell("connection", "Connected", "on");
  document.body.dataset.priced = state.priced; // so some words are there, and others are not
  tell("source", state.priced ? "predicted" : "measured");
  tell("description", state.priced ? state.description.split(",")[0] : state.description);
  tell("guess", state.guess && `Note: ${state.guess}.`);
  get("policy").replaceChildren(...state.policies.map((name) => new Option(name)));
  showPolicy();
  showChats();
  const slots = state.max_batch_size;
  const chats = Math.max(1, slots - 1); // a slot is left for the long prompt
  limit("chat-count", Math.min(state.most, slots), Math.min(8, chats));
  limit("long-tokens", state.longest, state.long);
  limit("burst-count", state.most);
  limit("max-tokens", state.max_length);
}

// The most that a number may be; `usual` is set where the reader has set nothing.
function limit(id, most, usual) {
  const input = get(id);
  input.max = most;
  if (usual && input.value === input.defaultValue) input.value = usual;
  if (input.valueAsNumber > most) input.value = most;
}

function showPolicy() {
  const { policy, chunk_size: size } = schedule.state;
  select(get("policy"), policy);
  get("chunk").value = size;
  document.body.dataset.policy = policy;
}

function showChats() {
  const run = schedule.state.chats > 0;
  get("chats").dataset.on = run;
  tell("chats", run ? "Stop the chats" : "Start chats");
}

let spoken = { text: "", kind: "", at: -SPOKEN };

function say(now, t) {
  const off = get("connection").dataset.kind === "off";
  const { kind, text } = off ? { kind: "off", text: "Not connected to the engine." } : schedule.sentence(t);
  tell("sentence", text, kind);
  const news = ["froze", "smooth"].includes(kind) && text !== spoken.text;
  if ((news || kind !== spoken.kind) && now - spoken.at > SPOKEN) {
    spoken = { kind, text, at: now };
    tell("spoken", text);
  }
}

function showNumbers() {
  const { slo, state } = schedule;
  if (!state.policies) return; // nothing is known yet
  const { running, capacity, policy, budget } = state;
  const pace = schedule.pace();
  tell("waiting", whole(state.waiting));
  tell("running", `${whole(running)} of ${state.max_batch_size}`);
  tell("held", whole(state.held) + (capacity ? ` of ${whole(capacity)}` : ""));
  tell("median", running && pace ? seconds(pace) : "none");
  const none = budget === null ? `${policy} takes whole prompts: no token budget` : "";
  tell("budget", budget ? `token budget C = ${budget}` : none);
  get("slo").placeholder = schedule.median === null ? "" : `${Number((slo * 1000).toPrecision(3))}`;
  const tallies = [...schedule.tallies.values()];
  const text = JSON.stringify([slo === null, tallies]);
  if (get("stalls").dataset.text === text) return;
  get("stalls").dataset.text = text;
  get("stalls").replaceChildren(...tallies.map((tally) => {
    const stalls = slo === null ? "no SLO" : whole(tally.stalls);
    const cells = [tally.c ?? "none", whole(tally.gaps), stalls, seconds(tally.longest)];
    const head = make("th", { scope: "row" }, tally.policy);
    const row = make("tr", {}, head, ...cells.map((cell) => make("td", {}, cell)));
    Object.assign(row.dataset, { policy: tally.policy, stalls });
    return row;
  }));
}

let drawn = -1; // s: when

function frame() {
  const now = clock();
  if (now - drawn >= (calm.matches ? CALM : FRAME)) {
    drawn = now;
    const t = schedule.time(now);
    const { still, at, to } = paused ?? { still: schedule, at: t, to: pictures.edge(schedule, t, shown) };
    pictures.draw(still, to - shown, to, at);
    say(now, t);
    showNumbers();
  }
  requestAnimationFrame(frame);
}

// ------------------------------------------------------------------------------ the view

function pause(yes) {
  const at = schedule.time(clock());
  const end = pictures.edge(schedule, at, shown);
  paused = yes ? { still: schedule.still(), at, end, to: end } : null;
  get("pause").dataset.on = yes;
  tell("pause", yes ? "Go on" : "Pause");
}

function move(share) {
  if (!paused && share > 0) return; // nothing is later than now
  if (!paused) pause(true);
  paused.to = Math.max(Math.min(paused.to + share * shown, paused.end), paused.end - KEPT);
}

// Show less time, or more. What stands still keeps the moment at `place` (0: left, 1: right).
function zoom(step, place = 0.5) {
  const next = WINDOWS.indexOf(shown) + step;
  const before = shown;
  shown = WINDOWS[Math.max(0, Math.min(next, WINDOWS.length - 1))];
  tell("seconds", `${shown} s`);
  if (paused) paused.to = Math.min(paused.to - (1 - place) * (before - shown), paused.end);
}

const MOVES = { // by button
  "pause": () => pause(!paused),
  "back": () => move(-0.25),
  "forward": () => move(0.25),
  "zoom-in": () => zoom(-1),
  "zoom-out": () => zoom(1),
};
const KEYS = {
  " ": "pause", "ArrowLeft": "back", "ArrowRight": "forward", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out",
};
for (const [id, act] of Object.entries(MOVES)) get(id).onclick = act;
get("lanes").onkeydown = (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  MOVES[KEYS[event.key]]();
};
for (const id of ["lanes", "rows", "tbt"]) {
  get(id).onclick = (event) => {
    if (!paused) pause(true);
    zoom(-1, pictures.share(event.offsetX));
  };
}
get("anew").onclick = () => schedule.tallies.clear();
get("slo").onchange = () => {
  if (!get("slo").reportValidity()) return;
  const given = number("slo"); // not a number: the page's own SLO
  for (const each of [schedule, paused?.still]) each?.setSLO(given > 0 ? given / 1000 : null);
};

// ------------------------------------------------------------------------------ the buttons

// Throw in what a button says, and as much of it as its number says.
function throwIn(kind, name, id) {
  if (get(id).value || get(id).reportValidity()) send("/live/throw", { kind, [name]: number(id) });
}

const chat = () => throwIn("chats", "count", "chat-count");
const endChats = () => send("/live/throw", { kind: "chats", count: 0 });

get("chats").onclick = () => (schedule.state.chats ? endChats() : chat());
get("chat-count").onchange = () => schedule.state.chats && chat();
get("long").onclick = () => throwIn("long", "tokens", "long-tokens");
get("burst").onclick = () => throwIn("burst", "count", "burst-count");
get("switch").onsubmit = (event) => {
  event.preventDefault();
  send("/live/policy", { policy: get("policy").value, chunk_size: number("chunk") });
};

// ------------------------------------------------------------------------------ the demonstration

let showing = null; // an AbortController: what ends it

// Wait until something is so, and then for a step.
async function until(ready, signal) {
  while (!ready()) {
    await rest(0.1);
    signal.throwIfAborted();
  }
  await rest(STEP);
  signal.throwIfAborted();
}

// The same chats and the same long prompt under one policy after the other. Then the pictures stop.
async function demonstrate() {
  showing = new AbortController();
  const { signal } = showing;
  const prefilled = (id) => schedule.iterations.some(({ chunks }) =>
    chunks.some(([request, , , , isLast]) => request === id && isLast));
  get("show").dataset.on = true;
  complain();
  try {
    pause(false);
    zoom(WINDOWS.indexOf(WHOLE) - WINDOWS.indexOf(shown));
    schedule.tallies.clear();
    for (const policy of SHOWN) {
      await call("/live/policy", { policy, chunk_size: number("chunk") }, signal);
      await call("/live/throw", { kind: "chats", count: number("chat-count") }, signal);
      await until(() => schedule.slo !== null, signal);
      const long = await call("/live/throw", { kind: "long", tokens: number("long-tokens") }, signal);
      const { ids: [id] } = await long.json();
      await until(() => prefilled(id), signal);
    }
    pause(true);
    schedule.tellAll();
  } catch (error) {
    if (signal.aborted) return;
    complain(error.message);
  }
  endShow();
}

function endShow() {
  showing.abort();
  showing = null;
  get("show").dataset.on = false;
  endChats();
}

// The link to it shows it once.
async function showFromLink() {
  if (location.hash !== "#show") return;
  history.replaceState(null, "", location.pathname);
  while (!schedule.state.policies) await rest(0.1);
  demonstrate();
}

get("show").onclick = () => (showing ? endShow() : demonstrate());
window.onhashchange = showFromLink;

// ------------------------------------------------------------------------------ the reader's prompt

let asking = null; // the request of the prompt box, while it runs
let chats; // whether the model has a chat template

function ask(asked) {
  asking = asked;
  get("send").disabled = Boolean(asked);
  get("stop").disabled = !asked;
}

// Stream the answer to a prompt: of a chat, or of a text that the model continues.
async function answerTo(prompt, signal) {
  chats ??= (await (await call("/v1/models", null, signal)).json()).data[0].chat;
  const begin = clock();
  const path = chats ? "/v1/chat/completions" : "/v1/completions";
  const what = chats ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const body = { max_tokens: number("max-tokens"), stream: true, ...what };
  let first = null; // s: when the first text came
  let reason = "";
  for await (const data of events(await call(path, body, signal))) {
    if (data === "[DONE]") break;
    const { error, choices } = JSON.parse(data);
    if (error) throw new Problem(error.message);
    first ??= clock() - begin;
    const [{ text, delta, finish_reason: why }] = choices;
    tell("text", (get("text").textContent + (text ?? delta.content ?? "")).slice(-MOST_TEXT));
    reason = why ?? reason;
  }
  if (!reason) throw new Problem("The server ended before the text did.");
  const kind = chats ? "Sent as a chat." : "Sent as a text to continue: there is no chat template.";
  return `${kind} First text after ${seconds(first ?? 0)}, the end ("${reason}") after ` +
    `${seconds(clock() - begin)}, as this page sees it.`;
}

get("ask").onsubmit = async (event) => {
  event.preventDefault();
  if (asking) return;
  ask(new AbortController());
  tell("text", "");
  tell("asked", "Sent.");
  try {
    tell("asked", await answerTo(get("prompt").value, asking.signal));
  } catch (error) {
    const why = error instanceof Problem ? error.message : "The server does not answer.";
    tell("asked", asking.signal.aborted ? "Stopped." : why);
  }
  ask(null);
};
get("stop").onclick = () => asking?.abort();

tell("slo-note", "A stall is a gap between two tokens that is longer than the SLO. If you give no SLO, it is " +
  `${FACTOR} times the median of the first ${ENOUGH} gaps, and at least ${seconds(LEAST)}.`);
const drawLegend = () => legend(get("legend"));
onKey(() => tryNow());
onLook(drawLegend);
drawLegend();
zoom(0);
watch();
showFromLink();
requestAnimationFrame(frame);
