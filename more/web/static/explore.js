// The explorer: it asks Python for two schedules of the same requests, and has them drawn.
//
// It computes no schedule. Python runs in a worker of this browser (python.js), or on the server that
// gave the page. The state is in the address after #, so that every picture is a link.

import { get, make, Problem } from "./dom.js";
import { drawGain, legend, Pictures } from "./draw.js";
import { call, complain, onKey, onLook, rest, select, tell } from "./page.js";
import { LIMIT, Python, readManifest } from "./python.js";
import { contents, Schedule, whole } from "./schedule.js";

const KINDS = ["prefill", "decode", "waiting", "stall", "queue"]; // in the legend
const STEPS = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };

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
  name = Promise.resolve("Python on the server");

  end() {}

  async ask(question) {
    return (await call("run", question)).json();
  }
}

function endless() {
  const long = `${LIMIT / 1000} s`;
  return own ? `Your policy ran for ${long} without an end, so it was stopped. Is there a loop that never ends?`
    : `This takes more than ${long}, so it was stopped: choose fewer or shorter requests.`;
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
  wanted = { call: "schedule", state, x: ratio, own };
  if (busy) return;
  busy = true;
  while (wanted) {
    const question = wanted;
    wanted = null;
    try {
      const answer = await schedules.ask(question);
      if (!wanted) show(answer);
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
  tell("own-says", endless(), "bad"); // a policy that never ends is not tried again
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

function show(answer) {
  complain(answer.error);
  if (!answer.state) return;
  state = answer.state;
  history.replaceState(null, "", answer.link ? `#${answer.link}` : location.pathname + location.search);
  get("link").value = location.href;
  for (const [name, value] of Object.entries(state)) fields[name](value);
  fields.ratio(state.P / state.D);
  get("notes").replaceChildren(...(answer.notes ?? []).map((note) => make("li", {}, note)));
  document.body.classList.toggle("stale", Boolean(answer.error));
  turn += 1;
  if (answer.error) return;
  shown = answer;
  draw();
  document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
  schedules.name.then((name) => tell("status", `${name}. Move a slider: both are drawn again.`));
  traceGain(turn);
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

const together = (text) => text.replace(/(\d) (m?s)\b/g, "$1\u00a0$2"); // no line ends before a unit

// The left schedule or the right one: what is said of it, its picture, its numbers.
class Side {
  constructor(number) {
    this.number = number;
    const part = (selector) => document.querySelector(`#side-${number} ${selector}`);
    this.name = part("code");
    this.says = part(".says");
    this.canvas = part("canvas");
    this.step = part(".step");
    this.numbers = part("dl");
    this.pictures = new Pictures({ lanes: this.canvas });
    this.canvas.onpointermove = ({ offsetX }) => this.point(this.pictures.share(offsetX) * this.end);
    this.canvas.onpointerleave = () => this.choose(null);
    this.canvas.onblur = () => this.choose(null);
    this.canvas.onkeydown = (event) => {
      if (!STEPS[event.key]) return;
      event.preventDefault();
      this.choose((this.chosen ?? -1) + STEPS[event.key]);
    };
  }

  // answer: of explorer.py; end: of the axis of time, in seconds.
  show(answer, end) {
    const { policy, error, says = [], iterations = [], places, stalls, queue, numbers } = answer;
    this.end = end;
    this.name.textContent = named(shown.state, this.number);
    this.canvas.hidden = Boolean(error);
    this.numbers.hidden = Boolean(error);
    this.schedule = null;
    if (error) {
      this.says.replaceChildren(make("b", {}, error));
      return;
    }
    const marks = shown.long === null ? [] : [{ t: shown.long, lane: null, text: "the long prompt arrives" }];
    const all = { max_batch_size: 1 }; // lanes for all who run, and no more
    this.schedule = new Schedule({ iterations, places, stalls, queue, marks, newest: end, state: all });
    const [first, ...rest] = says.map(together);
    this.says.replaceChildren(make(stalls.length ? "b" : "span", {}, first), ` ${rest.join(" ")}`);
    this.canvas.ariaLabel = `Schedule under ${policy}. ${says.join(" ")} Arrow keys go through the iterations.`;
    this.choose(null);
    this.numbers.replaceChildren();
    for (const [name, [title, unit, factor]] of Object.entries(manifest.page.numbers)) {
      const value = numbers[name];
      const className = name === "longest_stall" && value !== null ? "alarm" : "";
      const words = value === null ? ["none"] : [digits(value * factor), " ", make("small", {}, unit)];
      this.numbers.append(make("div", {}, make("dt", {}, title), make("dd", { className }, ...words)));
    }
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
    const { t, seconds } = iteration ?? {};
    this.step.textContent = iteration ? `Iteration ${this.chosen} at ${t.toFixed(3)} s, ` +
      `${(1000 * seconds).toFixed(1)} ms: ${contents(iteration)}.` : "";
  }
}

// ----------------------------------------------------------------------------------- the gain

// One point after the other, until a newer schedule is shown.
async function traceGain(mine) {
  const { balance, state: asked } = shown;
  const now = asked.P / asked.D;
  const points = [];
  get("gain-rows").replaceChildren();
  tell("gain-now", "");
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
        tell("gain-now", `P:D = ${digits(x)}: ${point.error}.`);
        continue;
      }
      points.push(point);
      redrawGain();
      const cells = [digits(point.x), point.P, point.D, digits(point.left), digits(point.right)];
      cells.push(point.gain.toFixed(3));
      get("gain-rows").append(make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
    }
    if (points.length) tell("gain-now", sayGain(points, now));
    document.body.dataset.gain = points.length;
  } catch (error) {
    if (mine === turn) fail(error);
  }
}

function sayGain(points, now) {
  const best = points.reduce((a, b) => (b.gain > a.gain ? b : a));
  const here = points.find(({ x }) => Math.abs(x / now - 1) < 1e-9);
  const most = `The highest gain is ${best.gain.toFixed(2)}, at P:D = ${digits(best.x)}.`;
  return here ? `At this P:D of ${digits(now)}, the gain is ${here.gain.toFixed(2)}. ${most}` : most;
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
  return make("div", { className: "field wide" }, make("label", { htmlFor: list.id }, label), list);
}

// A box for a number, and a slider with stops.
function addRange({ name, label, unit, least, most, whole: only, stops }) {
  const numbers = { type: "number", min: least, max: most, step: only ? 1 : "any" };
  const box = make("input", { id: `c-${name}`, name, ...numbers });
  const slider = make("input", { type: "range", min: 0, max: stops.length - 1, ariaLabel: label });
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
  const words = make("label", { htmlFor: box.id }, `${label} `, make("small", {}, unit));
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
    make("a", { href: `#${link}` }, title)));
  get("code").value = sessionStorage.getItem("own") ?? get("code").value;
  get("code").oninput = () => sessionStorage.setItem("own", get("code").value);
  get("run").onclick = runOwn;
  get("copy").onclick = copyLink;
  get("link").onblur = () => tell("copied", "");
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
  tell("copied", copied ? "Copied" : "Link selected: press Ctrl-C or Cmd-C");
}

async function runOwn() {
  const code = get("code").value;
  const before = own;
  tell("own-says", "Python is loading ...");
  try {
    own = code;
    choosePython();
    const { names, error } = await schedules.ask({ call: "own", own });
    if (error) throw new Problem(error);
    state = { ...state, right: names[0] };
    setPolicies(names);
    tell("own-says", `Runs on the right: ${names[0]}.`);
    refresh();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    tell("own-says", error.message, "bad");
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
  tell("status", "Python is loading; the sliders work in a moment.");
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
