// The explorer: it asks Python for two schedules of the same requests, and has them drawn.
//
// It computes no schedule. Python runs in a worker of this browser (python.js), or on the server that
// gave the page. The state is in the address after #, so that every picture is a link.

import { get, make, Problem } from "./dom.js";
import { drawGain, legend, Pictures } from "./draw.js";
import { call, clock, complain, onKey, onLook, rest, select } from "./page.js";
import { LIMIT, Python, readManifest } from "./python.js";
import { many, Schedule, whole } from "./schedule.js";

const KINDS = ["prefill", "decode", "waiting", "stall", "queue"]; // in the legend
const STEPS = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
const MOST_TOLD = 4; // chunks of an iteration

let manifest; // of more/web/bundle.py
let state = {}; // what is asked for
let shown = null; // the last answer that was drawn
let sides; // the left and the right one
let schedules; // two Pythons, so that no point of the curve delays a schedule
let gains;
let own = ""; // the policies that were pasted: Python hears them with each question
let busy = false; // one question at a time ...
let wanted = null; // ... and the newest of those that wait
let turn = 0; // of the gain curve: a newer one ends it
let redrawGain = () => {};
const fields = {}; // by name: how to show a value

const digits = (value) => (value >= 100 ? whole(Math.round(value)) : value.toPrecision(3));

// ------------------------------------------------------------------------------------- Python

// Python on the server that gave this page: it has no worker.
class ServerPython {
  loaded = true;
  name = Promise.resolve("Python on the server");

  end() {}

  async ask(question) {
    return (await call("run", question)).json();
  }
}

function endless() {
  return own
    ? `Your policy ran for ${LIMIT / 1000} s without an end, so it was stopped. Is there a loop that never ends?`
    : `This takes more than ${LIMIT / 1000} s, so it was stopped: choose fewer or shorter requests.`;
}

// The pasted text runs in the browser alone, whatever else the server can do.
function choosePython() {
  const kind = own || !manifest.server ? Python : ServerPython;
  if (schedules instanceof kind) return;
  for (const each of [schedules, gains]) each?.end("");
  schedules = new kind(manifest, location.href, { endless });
  gains = kind === ServerPython ? schedules : null; // a worker of its own, when it is needed
}

// ---------------------------------------------------------------------------------- questions

// Ask for a schedule; while one is on its way, only the newest question waits.
async function refresh(ratio = null) {
  wanted = { asked: { ...state }, ratio, since: schedules.loaded ? clock() : null };
  if (busy) return;
  busy = true;
  while (wanted) {
    const { asked, ratio: x, since } = wanted;
    wanted = null;
    try {
      const answer = await schedules.ask({ call: "schedule", state: asked, x, own });
      if (!wanted) show(answer, since);
    } catch (error) {
      fail(error);
    }
  }
  busy = false;
}

function fail(error) {
  if (!(error instanceof Problem)) throw error;
  if (error.message) complain(error.message); // without one, it was ended on purpose
  if (!own || error.message !== endless()) return;
  sayOwn(endless(), true); // a policy that never ends is not tried again
  own = "";
  const { left, right } = manifest.page.defaults;
  state = { ...state, left, right };
  setPolicies([]);
  choosePython();
  refresh();
}

function change(name, value) {
  if (name === "ratio") return refresh(Number(value));
  state = { ...state, [name]: value };
  return refresh();
}

// --------------------------------------------------------------------------------- the answer

function show(answer, since) {
  complain(answer.error);
  if (!answer.state) return;
  state = answer.state;
  history.replaceState(null, "", answer.link ? `#${answer.link}` : location.pathname + location.search);
  get("link").value = location.href;
  for (const [name, value] of Object.entries(state)) fields[name](value);
  fields.ratio(state.P / state.D);
  get("notes").replaceChildren(...(answer.notes ?? []).map((note) => make("li", { textContent: note })));
  document.body.classList.toggle("stale", Boolean(answer.error));
  turn += 1;
  if (answer.error) return;
  shown = answer;
  draw();
  const { dataset } = document.body;
  if (since !== null) dataset.redraw = (1000 * (clock() - since)).toFixed(0);
  dataset.drawn = Number(dataset.drawn ?? 0) + 1;
  about(dataset.redraw);
  traceGain(turn);
}

async function about(redraw) {
  const where = await schedules.name;
  get("status").className = "";
  get("status").textContent = "Move a slider: both are drawn again.";
  get("about").textContent = "Predicted by the repository's own scheduler.py and costmodel.py, unchanged, for " +
    `${state.model} on ${state.tp} × ${state.gpu}. ${where}${redraw ? `; drawn in ${redraw} ms` : ""}.`;
}

function draw() {
  const end = Math.max(1e-9, ...shown.sides.map(({ iterations = [] }) => iterations.at(-1)?.end ?? 0));
  sides.forEach((side, number) => side.show(shown.sides[number], end));
  drawLegend();
}

const drawLegend = () => legend(get("legend"), KINDS, shown?.bound);

// A side's policy, with its C where the two have their own.
function named({ left, right, C, C_right: other }, number) {
  const policy = number ? right : left;
  return other && other !== C ? `${policy}, C = ${number ? other : C}` : policy;
}

const called = (request) => (state.long && request === state.n ? "the long prompt" : `request ${request}`);
const together = (text) => text.replace(/(\d) (m?s)\b/g, "$1\u00a0$2"); // no line ends before a unit

// The left schedule or the right one: what is said of it, its picture, its numbers.
class Side {
  constructor(number) {
    this.number = number;
    this.heading = make("h2");
    this.says = make("p", { className: "says" });
    this.canvas = make("canvas", { tabIndex: 0, role: "img" });
    this.step = make("p", { className: "step", ariaLive: "polite" });
    this.numbers = make("dl");
    this.pictures = new Pictures({ lanes: this.canvas });
    this.canvas.onpointermove = ({ offsetX }) => this.point(this.pictures.share(offsetX) * this.end);
    this.canvas.onpointerleave = () => this.choose(null);
    this.canvas.onblur = () => this.choose(null);
    this.canvas.onkeydown = (event) => {
      if (!STEPS[event.key]) return;
      event.preventDefault();
      this.choose((this.chosen ?? -1) + STEPS[event.key]);
    };
    get(`side-${number}`).append(this.heading, this.says, this.canvas, this.step, this.numbers);
  }

  // answer: of explorer.py; end: of the axis of time, in seconds.
  show(answer, end) {
    const { policy, error, says = [], iterations = [], places, stalls, queue, numbers } = answer;
    this.end = end;
    this.heading.replaceChildren(this.number ? "right: " : "left: ", make("code", { textContent: named(shown.state, this.number) }));
    this.canvas.hidden = Boolean(error);
    this.numbers.hidden = Boolean(error);
    this.schedule = null;
    if (error) {
      this.says.replaceChildren(make("b", { textContent: error }));
      return;
    }
    const marks = shown.long === null ? [] : [{ t: shown.long, lane: null, text: "the long prompt arrives" }];
    const all = { max_batch_size: 1 }; // lanes for all who run, and no more
    this.schedule = new Schedule({ iterations, places, stalls, queue, marks, newest: end, state: all });
    const [first, ...rest] = says.map(together);
    this.says.replaceChildren(make(stalls.length ? "b" : "span", { textContent: first }), ` ${rest.join(" ")}`);
    const keys = "Arrow keys go through the iterations.";
    this.canvas.setAttribute("aria-label", `Schedule under ${policy}. ${says.join(" ")} ${keys}`);
    this.choose(null);
    this.numbers.replaceChildren(...Object.entries(manifest.page.numbers).map(([name, [title, unit, factor]]) => {
      const value = numbers[name];
      const shown = value === null ? ["none"] : [digits(value * factor), " ", make("small", { textContent: unit })];
      const className = name === "longest_stall" && value !== null ? "alarm" : "";
      return make("div", {}, make("dt", { textContent: title }), make("dd", { className }, ...shown));
    }));
  }

  point(moment) {
    const found = this.schedule?.iterations.findIndex(({ t, end }) => t <= moment && moment < end);
    this.choose(found >= 0 ? found : null);
  }

  // Frame an iteration, and tell it in words. null: none.
  choose(step) {
    if (!this.schedule) return;
    const { iterations } = this.schedule;
    this.chosen = step === null ? null : Math.min(Math.max(step, 0), iterations.length - 1);
    const iteration = iterations[this.chosen];
    this.pictures.draw(this.schedule, 0, this.end, this.end, iteration);
    this.step.textContent = iteration ? this.tell(iteration) : "";
  }

  tell({ t, seconds, chunks, decodes }) {
    const parts = chunks.slice(0, MOST_TOLD).map(([request, , first, tokens]) =>
      `${tokens} prompt tokens of ${called(request)} (from token ${first})`);
    if (chunks.length > MOST_TOLD) parts.push(many(chunks.length - MOST_TOLD, "more chunk"));
    if (decodes.length) parts.push(many(decodes.length, "decode"));
    return `Iteration ${this.chosen} at ${t.toFixed(3)} s, ${(1000 * seconds).toFixed(1)} ms: ${parts.join(", ")}.`;
  }
}

// ----------------------------------------------------------------------------------- the gain

// One point after the other, until a newer schedule is shown.
async function traceGain(mine) {
  const asked = { ...state };
  const { balance } = shown;
  const now = state.P / state.D;
  const points = [];
  const [left, right] = [0, 1].map((number) => named(asked, number));
  get("gain-title").textContent = `What ${right} gains over ${left}, by P:D`;
  get("gain-text").textContent = `Throughput of the right over the left in a steady state: always ${asked.B} requests` +
    ` at once, each of ${whole(asked.P + asked.D)} tokens, as in SARATHI's Fig 9. Predicted.`;
  get("gain-left").textContent = `${left}, tokens/s`;
  get("gain-right").textContent = `${right}, tokens/s`;
  get("gain-rows").replaceChildren();
  get("gain-now").textContent = "";
  document.body.dataset.gain = "";
  await rest(0.15); // not while a slider moves
  if (mine !== turn) return;
  gains ??= new Python(manifest, location.href, { endless });
  try {
    const { points: all, error } = await gains.ask({ call: "gain_points", state: asked, own });
    if (error) throw new Problem(error);
    redrawGain = () => drawGain(get("gain-canvas"), points, all, now, balance);
    for (const x of all) {
      if (mine !== turn) return;
      const point = await gains.ask({ call: "gain_point", state: asked, x, own });
      if (mine !== turn) return;
      if (point.error) {
        get("gain-now").textContent = `P:D = ${digits(x)}: ${point.error}.`;
        continue;
      }
      points.push(point);
      redrawGain();
      const cells = [digits(point.x), point.P, point.D, digits(point.left), digits(point.right), point.gain.toFixed(3)];
      get("gain-rows").append(make("tr", {}, ...cells.map((textContent) => make("td", { textContent }))));
    }
    if (points.length) get("gain-now").textContent = sayGain(points, now, left, right);
    document.body.dataset.gain = points.length;
  } catch (error) {
    if (mine === turn) fail(error);
  }
}

function sayGain(points, now, left, right) {
  const best = points.reduce((a, b) => (b.gain > a.gain ? b : a));
  const here = points.find(({ x }) => Math.abs(x / now - 1) < 1e-9);
  const most = `The highest gain is ${best.gain.toFixed(2)}, at P:D = ${digits(best.x)}.`;
  return here ? `With an endless queue of equal requests, at this P:D of ${digits(now)}, ${right} has ` +
    `${here.gain.toFixed(2)} times the throughput of ${left}. ${most}` : most;
}

// ----------------------------------------------------------------------------------- controls

function addControls() {
  const { controls, ratio } = manifest.page;
  const known = Object.fromEntries([...controls, ratio].map((control) => [control.name, control]));
  for (const set of document.querySelectorAll("fieldset")) {
    for (const name of set.dataset.fields.split(" ")) {
      set.append(known[name].choices ? addChoice(known[name]) : addRange(known[name]));
    }
  }
}

function addChoice({ name, label, choices }) {
  const list = make("select", { id: `c-${name}`, name }, ...choices.map((choice) => new Option(choice)));
  list.onchange = () => change(name, list.value);
  fields[name] = (value) => select(list, value);
  return make("div", { className: "field wide" }, make("label", { htmlFor: list.id, textContent: label }), list);
}

// A box for a number, and a slider with stops.
function addRange({ name, label, unit, least, most, whole: only, stops }) {
  const box = make("input", { id: `c-${name}`, name, type: "number", min: least, max: most, step: only ? 1 : "any" });
  const slider = make("input", { type: "range", min: 0, max: stops.length - 1, step: 1, ariaLabel: label });
  const note = (value) => {
    box.value = value;
    slider.ariaValueText = `${value} ${unit}`;
  };
  slider.oninput = () => {
    note(stops[slider.value]);
    change(name, stops[slider.value]);
  };
  box.onchange = () => change(name, box.value);
  fields[name] = (value) => {
    note(only ? value : Number(Number(value).toPrecision(3)));
    if (document.activeElement === slider) return;
    const far = stops.map((stop) => Math.abs(stop - value));
    slider.value = far.indexOf(Math.min(...far));
  };
  const words = make("label", { htmlFor: box.id }, `${label} `, make("small", { textContent: unit }));
  return make("div", { className: "field" }, words, box, slider);
}

// The lists of policies, with those that were pasted.
function setPolicies(names) {
  const ours = manifest.page.controls.find(({ name }) => name === "left").choices;
  for (const name of ["left", "right"]) {
    get(`c-${name}`).replaceChildren(...[...ours, ...names].map((each) => new Option(each)));
    fields[name](state[name]);
  }
}

function addRest() {
  get("examples").append("Try: ", ...manifest.page.examples.map(({ title, link }) =>
    make("a", { href: `#${link}`, textContent: title })));
  get("code").value = sessionStorage.getItem("own") ?? get("code").value;
  get("code").oninput = () => sessionStorage.setItem("own", get("code").value);
  get("run").onclick = runOwn;
  get("copy").onclick = copyLink;
  get("link").onblur = () => (get("copied").textContent = "");
  get("controls").onsubmit = (event) => event.preventDefault();
  window.onhashchange = fromLink;
  onKey(refresh);
  onLook(() => {
    for (const side of sides) side.choose(side.chosen);
    drawLegend();
    redrawGain();
  });
}

async function copyLink() {
  const link = get("link");
  link.focus();
  link.select();
  const copying = navigator.clipboard?.writeText(link.value); // there is none over plain HTTP
  const copied = await copying?.then(() => true, () => false);
  get("copied").textContent = copied ? "Copied" : "Link selected: press Ctrl-C or Cmd-C";
}

function sayOwn(text, bad = false) {
  get("own-says").textContent = text;
  get("own-says").className = bad ? "bad" : "";
}

async function runOwn() {
  const code = get("code").value;
  const before = own;
  sayOwn("Python is loading ...");
  try {
    own = code;
    choosePython();
    const { names, error } = await schedules.ask({ call: "own", own });
    if (error) throw new Problem(error);
    state = { ...state, right: names[0] };
    setPolicies(names);
    sayOwn(`Runs on the right: ${names[0]}.`);
    refresh();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    sayOwn(error.message, true);
    own = before;
    choosePython();
  }
}

// -------------------------------------------------------------------------------------- start

function fromLink() {
  state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  refresh();
}

async function start() {
  get("status").className = "";
  get("status").textContent = "Python is loading; the sliders work in a moment.";
  manifest = await readManifest("python -m more.web.bundle");
  if (!manifest) return;
  document.querySelector("main").hidden = false;
  sides = [new Side(0), new Side(1)];
  addControls();
  addRest();
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
