// The explorer's page. It asks Python, and draws what Python answers; it computes no schedule.
//
// Python runs in a worker of this browser (python.js), or on the server that gave the page.
// The state is in the address after #, so that every picture is a link.

import { get, make } from "./dom.js";
import { drawGain, drawSchedule, stepAt } from "./explore_draw.js";
import { LIMIT, Problem, Python, readManifest } from "./python.js";

const KEY = "nano-sarathi-key"; // as in live.js: given once, it opens both pages
const COPIED = 3000; // ms for which "Copied" is shown
const OWN = `from batch import Batch
from scheduler import SarathiServe


class ShortestFirst(SarathiServe):
    name = "shortest_first"  # of the waiting requests, the one with the shortest prompt is next

    def schedule(self, now: float) -> Batch | None:
        shortest = sorted(self.waiting, key=lambda request: request.prefill_length)
        self.waiting.clear()
        self.waiting.extend(shortest)
        return super().schedule(now)
`;
const GROUPS = {
  "Policies": ["left", "right", "C", "C_right", "B"],
  "Requests": ["long", "n", "P", "D", "ratio", "spread", "rate", "seed"],
  "Where": ["model", "gpu", "tp", "software"],
};
const WIDE = ["left", "right", "model", "gpu", "software"]; // selects with long names

let manifest; // of more/web/bundle.py
let state = {}; // what is asked for
let shown = null; // the last answer that was drawn
let schedules, gains; // two Pythons, so that no point of the curve delays a schedule
let own = ""; // the policies that were pasted, and are loaded
let busy = false, wanted = null; // one question at a time, and the newest of those that wait
let turn = 0; // of the gain curve: a newer one ends it
let steps = [null, null]; // the iteration that is chosen in each schedule
let copied; // the timer that takes "Copied" away
const fields = {}; // by name: how to show a value

// ------------------------------------------------------------------------------------------ Python

// `own` is the pasted text that it has loaded.
class BrowserPython extends Python {
  constructor() {
    super(manifest, location.href, { endless });
  }

  start() {
    this.own = "";
    super.start();
  }

  async ask(question) {
    await this.ready;
    if (this.own !== own && question.call !== "own") {
      this.own = own;
      await super.ask({ call: "own", code: own }); // whether it fails has been said before
    }
    return super.ask(question);
  }
}

// Python on the server that gave this page.
class ServerPython {
  loaded = true;

  end() {} // it has no worker

  async ask(question) {
    const key = sessionStorage.getItem(KEY);
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch("run", { method: "POST", headers, body: JSON.stringify(question) });
    } catch {
      throw new Problem("The server does not answer: start it again, and reload this page.");
    }
    if (response.status === 401) get("key-form").hidden = false;
    const answer = await response.json().catch(() => ({ error: `The server says ${response.status}.` }));
    if (!response.ok) throw new Problem(answer.error?.message ?? `The server says ${response.status}.`);
    return answer;
  }

  get name() {
    return Promise.resolve("Python on the server");
  }
}

function endless() {
  return own
    ? `Your policy ran for ${LIMIT / 1000} s without an end, so it was stopped. Is there a loop that never ends?`
    : `This takes more than ${LIMIT / 1000} s, so it was stopped: choose fewer or shorter requests.`;
}

// The pasted text runs in the browser alone, whatever else the server can do.
function choosePython() {
  const inBrowser = own || !manifest.server;
  if (schedules && schedules instanceof BrowserPython === Boolean(inBrowser)) return;
  for (const each of [schedules, gains]) each?.end("");
  schedules = inBrowser ? new BrowserPython() : new ServerPython();
  gains = null;
}

// ---------------------------------------------------------------------------------------- questions

// Ask for a schedule; while one is on its way, only the newest question waits.
async function refresh(ratio = null) {
  wanted = { state: { ...state }, ratio, since: schedules.loaded ? performance.now() : null };
  if (busy) return;
  busy = true;
  while (wanted) {
    const { state: asked, ratio: x, since: begun } = wanted;
    wanted = null;
    try {
      const answer = await schedules.ask({ call: "schedule", state: asked, x });
      if (!wanted) show(answer, begun);
    } catch (error) {
      complain(error);
    }
  }
  busy = false;
}

function complain(error) {
  if (!(error instanceof Problem)) throw error;
  if (!error.message) return; // ended on purpose
  get("problem").textContent = error.message;
  get("problem").hidden = false;
  if (own && error.message === endless()) forget();
}

function forget() { // a policy that never ends is not tried again
  get("own-says").textContent = endless();
  get("own-says").className = "bad";
  own = "";
  state = { ...state, left: manifest.page.defaults.left, right: manifest.page.defaults.right };
  setPolicies([]);
  choosePython();
  refresh();
}

function change(name, value) {
  if (name === "ratio") return refresh(Number(value));
  state = { ...state, [name]: value };
  return refresh();
}

// --------------------------------------------------------------------------------------- the answer

function show(answer, since) {
  get("problem").hidden = !answer.error;
  get("problem").textContent = answer.error ?? "";
  if (!answer.state) return;
  state = answer.state;
  history.replaceState(null, "", answer.link ? `#${answer.link}` : location.pathname + location.search);
  get("link").value = location.href;
  for (const [name, value] of Object.entries(state)) fields[name]?.(value);
  fields.ratio(state.P / state.D);
  get("notes").replaceChildren(...(answer.notes ?? []).map((note) => make("li", { textContent: note })));
  for (const id of ["side-0", "side-1", "gain"]) get(id).classList.toggle("stale", Boolean(answer.error));
  turn++;
  about();
  if (answer.error) return;
  shown = answer;
  steps = [null, null];
  draw();
  if (since !== null) document.body.dataset.redraw = (performance.now() - since).toFixed(1);
  document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1;
  traceGain(turn);
}

async function about() {
  const where = await schedules.name;
  get("status").className = "";
  get("status").textContent = "Move a slider: both are drawn again.";
  const { redraw } = document.body.dataset;
  get("about").textContent = `Predicted by the repository's own scheduler.py and costmodel.py, unchanged,` +
    ` for ${state.model} on ${state.tp} × ${state.gpu}. ${where}${redraw ? `; drawn in ${Math.round(redraw)} ms` : ""}.`;
}

// A side's policy, with its C where the two have their own.
function named({ left, right, C, C_right: other }, number) {
  const policy = number ? right : left;
  return other && other !== C ? `${policy}, C = ${number ? other : C}` : policy;
}

const ends = () => shown.sides.flatMap((side) => side.iterations ?? [])
  .reduce((most, { t, seconds }) => Math.max(most, t + seconds), 1e-9);

function draw() {
  const view = { end: ends(), long: shown.long };
  shown.sides.forEach((side, number) => {
    const article = get(`side-${number}`), [heading, says, canvas, , numbers] = article.children;
    heading.replaceChildren(number ? "right: " : "left: ", make("code", { textContent: named(shown.state, number) }));
    canvas.hidden = numbers.hidden = Boolean(side.error);
    if (side.error) {
      says.replaceChildren(make("b", { textContent: side.error }));
      return;
    }
    const [first, ...rest] = side.says.map(together);
    const begins = side.stalls.length ? make("b", { textContent: first }) : first;
    says.replaceChildren(begins, ` ${rest.join(" ")}`);
    drawSchedule(canvas, side, view, steps[number]);
    canvas.setAttribute("aria-label", `Schedule under ${side.policy}. ${side.says.join(" ")} Arrow keys go through the iterations.`);
    tell(number);
    numbers.replaceChildren(...Object.entries(manifest.page.numbers).map(([name, [title, unit, factor]]) => {
      const value = side.numbers[name];
      const text = value === null ? ["none"] : [digits(value * factor), " ", make("small", { textContent: unit })];
      const alarm = name === "longest_stall" && value !== null ? "alarm" : "";
      return make("div", {}, make("dt", { textContent: title }), make("dd", { className: alarm }, ...text));
    }));
  });
}

const together = (text) => text.replace(/(\d) (m?s)\b/g, "$1\u00a0$2"); // no line ends before a unit
const digits = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));

// The iteration that the keyboard or the pointer has chosen, in words.
function tell(number) {
  const side = shown.sides[number], step = steps[number], output = get(`side-${number}`).children[3];
  if (step === null) {
    output.textContent = "";
    return;
  }
  const { t, seconds, chunks, decodes } = side.iterations[step];
  const parts = chunks.slice(0, 4).map(([request, , first, tokens]) =>
    `${tokens} prompt tokens of ${called(request)} (from token ${first})`);
  if (chunks.length > 4) parts.push(`${chunks.length - 4} more chunks`);
  if (decodes.length) parts.push(`${decodes.length} decode${decodes.length > 1 ? "s" : ""}`);
  output.textContent = `Iteration ${step} at ${t.toFixed(3)} s, ${(1000 * seconds).toFixed(1)} ms: ${parts.join(", ")}.`;
}

const called = (request) => (state.long && request === state.n ? "the long prompt" : `request ${request}`);

function choose(number, step) {
  const side = shown?.sides[number];
  if (!side || side.error) return;
  steps[number] = step === null ? null : Math.min(Math.max(step, 0), side.iterations.length - 1);
  drawSchedule(get(`side-${number}`).children[2], side, { end: ends(), long: shown.long }, steps[number]);
  tell(number);
}

// --------------------------------------------------------------------------------------- the gain

// One point after the other, until a newer schedule is shown.
async function traceGain(mine) {
  const asked = { ...state }, { balance } = shown, now = state.P / state.D, points = [];
  const [left, right] = [named(asked, 0), named(asked, 1)];
  get("gain-title").textContent = `What ${right} gains over ${left}, by P:D`;
  get("gain-text").textContent = `Throughput of the right over the left in a steady state: always ${asked.B} requests` +
    ` at once, each of ${(asked.P + asked.D).toLocaleString("en")} tokens, as in SARATHI's Fig 9. Predicted.`;
  get("gain-left").textContent = `${left}, tokens/s`;
  get("gain-right").textContent = `${right}, tokens/s`;
  get("gain-rows").replaceChildren();
  get("gain-now").textContent = "";
  document.body.dataset.gain = "";
  await new Promise((resolve) => setTimeout(resolve, 150)); // not while a slider moves
  if (mine !== turn) return;
  if (!gains) gains = schedules instanceof ServerPython ? schedules : new BrowserPython();
  try {
    const { points: all, error } = await gains.ask({ call: "gain_points", state: asked });
    if (error) throw new Problem(error);
    for (const x of all) {
      if (mine !== turn) return;
      const point = await gains.ask({ call: "gain_point", state: asked, x });
      if (mine !== turn) return;
      if (point.error) {
        get("gain-now").textContent = `P:D = ${digits(x)}: ${point.error}.`;
        continue;
      }
      points.push(point);
      drawGain(get("gain-canvas"), points, all, now, balance);
      get("gain-rows").append(make("tr", {}, ...[digits(point.x), point.P, point.D, digits(point.left), digits(point.right),
        point.gain.toFixed(3)].map((text) => make("td", { textContent: text }))));
    }
    gainNow(points, now, left, right);
    document.body.dataset.gain = points.length;
    get("gain-canvas").redraw = () => drawGain(get("gain-canvas"), points, all, now, balance);
  } catch (error) {
    if (mine === turn) complain(error);
  }
}

function gainNow(points, now, left, right) {
  if (!points.length) return;
  const best = points.reduce((a, b) => (b.gain > a.gain ? b : a));
  const here = points.find((point) => Math.abs(point.x / now - 1) < 1e-9);
  const said = here ? `With an endless queue of equal requests, at this P:D of ${digits(now)}, ${right} has ${here.gain.toFixed(2)} times the throughput of ${left}. ` : "";
  get("gain-now").textContent = `${said}The highest gain is ${best.gain.toFixed(2)}, at P:D = ${digits(best.x)}.`;
}

// ----------------------------------------------------------------------------------------- controls

function addControls() {
  const { controls, ratio } = manifest.page;
  const known = Object.fromEntries([...controls, ratio].map((control) => [control.name, control]));
  for (const [title, names] of Object.entries(GROUPS)) {
    const set = make("fieldset", {}, make("legend", { textContent: title }));
    for (const name of names) set.append(known[name].choices ? addChoice(known[name]) : addRange(known[name]));
    get("controls").append(set);
  }
}

function addChoice({ name, label, choices }) {
  const select = make("select", { id: `c-${name}`, name });
  const add = (values) => {
    for (const value of values) {
      if (![...select.options].some((option) => option.value === value)) select.append(new Option(value));
    }
  };
  add(choices);
  select.onchange = () => change(name, select.value);
  fields[name] = (value) => {
    add([String(value)]);
    select.value = value;
  };
  const wide = WIDE.includes(name) ? " wide" : "";
  return make("div", { className: `field${wide}` }, make("label", { htmlFor: select.id, textContent: label }), select);
}

function addRange({ name, label, unit, least, most, whole, stops }) {
  const box = make("input", { id: `c-${name}`, name, type: "number", min: least, max: most, step: whole ? 1 : "any" });
  const slider = make("input", { type: "range", min: 0, max: stops.length - 1, step: 1, ariaLabel: label });
  const note = (value) => { slider.ariaValueText = `${value} ${unit}`; };
  slider.oninput = () => {
    box.value = stops[slider.value];
    note(box.value);
    change(name, stops[slider.value]);
  };
  box.onchange = () => change(name, box.value);
  fields[name] = (value) => {
    const text = whole ? value : Number(Number(value).toPrecision(3));
    if (document.activeElement !== slider) {
      let nearest = 0;
      stops.forEach((stop, i) => {
        if (Math.abs(stop - value) < Math.abs(stops[nearest] - value)) nearest = i;
      });
      slider.value = nearest;
    }
    note(text);
    box.value = text;
  };
  const words = make("label", { htmlFor: box.id }, `${label} `, make("small", { textContent: unit }));
  return make("div", { className: "field" }, words, box, slider);
}

// The lists of policies, with those that were pasted.
function setPolicies(names) {
  const ours = manifest.page.controls.find((control) => control.name === "left").choices;
  for (const name of ["left", "right"]) {
    get(`c-${name}`).replaceChildren(...[...ours, ...names].map((each) => new Option(each)));
    fields[name](state[name]);
  }
}

function addSides() {
  for (const number of [0, 1]) {
    const canvas = make("canvas", { tabIndex: 0, role: "img" });
    canvas.onpointermove = (event) => choose(number, stepAt(canvas, shown.sides[number], { end: ends() }, event.offsetX));
    canvas.onpointerleave = () => choose(number, null);
    canvas.onblur = () => choose(number, null);
    canvas.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
      if (!by) return;
      event.preventDefault();
      choose(number, steps[number] === null ? (by > 0 ? 0 : -1) + (Math.abs(by) > 10 ? by : 0) : steps[number] + by);
    };
    const step = make("p", { className: "step", ariaLive: "polite" });
    get(`side-${number}`).append(make("h2"), make("p", { className: "says" }), canvas, step, make("dl"));
  }
}

function addRest() {
  get("examples").append("Try: ", ...manifest.page.examples.map(({ title, link }) => make("a", { href: `#${link}`, textContent: title })));
  get("code").value = sessionStorage.getItem("own") || OWN;
  get("code").oninput = () => sessionStorage.setItem("own", get("code").value);
  get("run").onclick = runOwn;
  get("copy").onclick = copyLink;
  get("link").onblur = () => sayCopied("");
  get("key-form").onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, get("key").value);
    get("key-form").hidden = true;
    refresh();
  };
  get("controls").onsubmit = (event) => event.preventDefault();
  window.onhashchange = fromLink;
  window.onresize = matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    if (shown) draw();
    get("gain-canvas").redraw?.();
  };
}

async function copyLink() {
  const link = get("link");
  try {
    await navigator.clipboard.writeText(link.value); // there is no clipboard over plain HTTP
    sayCopied("Copied");
    copied = setTimeout(() => sayCopied(""), COPIED);
  } catch {
    link.focus();
    link.select();
    sayCopied("Link selected: press Ctrl-C or Cmd-C");
  }
}

function sayCopied(text) {
  clearTimeout(copied);
  get("copied").textContent = text;
}

async function runOwn() {
  const code = get("code").value, output = get("own-says");
  output.className = "";
  output.textContent = "Python is loading ...";
  const before = own;
  try {
    own = code;
    choosePython();
    const answer = await schedules.ask({ call: "own", code });
    if (answer.error) throw new Problem(answer.error);
    schedules.own = code;
    state = { ...state, right: answer.names[0] };
    setPolicies(answer.names);
    output.textContent = `Runs on the right: ${answer.names[0]}.`;
    refresh();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    output.textContent = error.message;
    output.className = "bad";
    own = before;
    schedules.own = null; // Python has forgotten it, too
    choosePython();
  }
}

// ------------------------------------------------------------------------------------------- start

function fromLink() {
  state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  refresh();
}

async function start() {
  const status = get("status");
  status.className = "";
  status.textContent = "Python is loading; the sliders work in a moment.";
  manifest = await readManifest("python -m more.web.bundle");
  if (!manifest) return;
  addControls();
  addSides();
  addRest();
  document.querySelector("main").hidden = false;
  for (const [name, value] of Object.entries(manifest.page.defaults)) fields[name](value);
  if (location.hash.length < 2) { // the default state is there before Python is
    shown = manifest.first;
    state = shown.state;
    fields.ratio(state.P / state.D);
    draw();
  }
  choosePython();
  fromLink();
}

start();
