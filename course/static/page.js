// The page of the exercises. It keeps what is written, and asks Python (course/browser.py) for the
// rest. Everything stays in this browser.

import { get, make, Problem } from "./dom.js";
import { Python, readManifest } from "./python.js";

const LIMIT = 20000; // ms without a sign of Python: then its worker is ended
const ENDED = "Your code ran for a long time without an end, so it was stopped. Does a loop never end?";
const KEPT = "nano-sarathi-exercises/"; // what our names in the browser's storage begin with

let manifest, exercises, python, editor;
let current, shown; // the exercise that is shown, and its text as this page last read or wrote it
let running = null; // the exercise that is checked
const results = {}; // by key: what Python answered

// ------------------------------------------------------------------------- what the browser keeps

let refused = false; // whether the browser keeps nothing
const memory = new Map(); // what it would have kept

function kept(name) {
  if (memory.has(name)) return memory.get(name);
  try {
    return localStorage.getItem(KEPT + name);
  } catch {
    refused = true;
    return null;
  }
}

function keep(name, text) { // null: no longer
  try {
    if (text === null) localStorage.removeItem(KEPT + name);
    else localStorage.setItem(KEPT + name, text);
    memory.delete(name);
  } catch {
    refused = true;
    memory.set(name, text);
  }
}

const textOf = ({ file, stub }) => kept(file) ?? stub;
const isWritten = (exercise) => textOf(exercise) !== exercise.stub;
const hasPassed = (exercise) => kept(`${exercise.file} passed`) !== null;

function write(exercise, text) {
  keep(exercise.file, text === exercise.stub ? null : text);
  keep(`${exercise.file} passed`, null);
  if (exercise === current) shown = textOf(current);
  progress();
}

// Another tab may have written. Its text is the newer one: it is shown, and never written over.
function catchUp() {
  const newer = textOf(current) !== shown;
  if (newer) {
    delete results[current.key];
    show();
    say(`Another tab has changed ${current.name}: this is its text.`);
  } else {
    showHints();
    progress();
  }
  return newer;
}

// ------------------------------------------------------------------------------------ the exercise

function show() {
  const key = decodeURIComponent(location.hash.slice(1)).toLowerCase().replace(/^e/, ""); // #6 or #e6
  current = exercises.find((each) => each.key === key) ?? exercises[0];
  const { name, title, lesson, page, lines, torch, properties } = current;
  const told = `Lesson ${lesson}`, link = () => make("a", { href: manifest.home + page, textContent: told });
  document.title = `${name}: ${title}`;
  get("title").textContent = `${name}: ${title}`;
  get("about").replaceChildren(manifest.home ? link() : told, `. About ${lines} lines.`);
  get("torch").hidden = !torch;
  get("check").hidden = torch;
  get("keys").textContent = (torch ? "" : "Ctrl-Enter (on a Mac, Cmd-Enter) checks. ")
    + (manifest.editor ? "Tab indents; Escape, then Tab leaves the editor." : "");
  if (torch) get("torch").replaceChildren(...needsTorch());
  editor.text = shown = textOf(current);
  get("properties").replaceChildren(...Object.entries(properties).flatMap(([property, sentence]) =>
    [make("dt", { textContent: property }), make("dd", { textContent: sentence })]));
  showHints();
  showResult();
  progress();
}

function needsTorch() {
  const { file, key } = current;
  return ["This exercise needs PyTorch, which no browser has. Write it here, or on your own machine. To check it, install the project (",
    make("code", { textContent: "make install" }), "), put ", make("code", { textContent: file }), " into ",
    make("code", { textContent: "course/mine/" }), ", and run ",
    make("code", { textContent: `python -m course check ${key}` }), "."];
}

function showHints() {
  const shown = Number(kept(`${current.file} hints`) ?? 0), all = current.hints;
  get("hints").hidden = !shown;
  get("hints").replaceChildren(...all.slice(0, shown).map((text) => make("li", {}, ...paragraphs(text))));
  get("hint").textContent = shown < all.length ? `Hint ${shown + 1} of ${all.length}` : "All hints are shown";
  get("hint").disabled = shown >= all.length;
}

// The hints' Markdown has paragraphs and `code`, no more.
function paragraphs(text) {
  return text.split(/\n\n+/).map((paragraph) => make("p", {}, ...paragraph.replace(/\n/g, " ").split("`")
    .map((part, i) => (i % 2 ? make("code", { textContent: part }) : part))));
}

function progress() {
  get("list").querySelectorAll("a").forEach((link, i) => {
    const each = exercises[i], is = hasPassed(each) ? "passed" : isWritten(each) ? "begun" : "";
    link.className = is;
    link.lastChild.textContent = is && ` (${is})`;
    if (each === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  const groups = {
    "passed when last checked": hasPassed,
    "not passed yet": (each) => isWritten(each) && !hasPassed(each),
    "not written yet": (each) => !isWritten(each),
  }; // the words of the command line
  get("state").replaceChildren(...Object.entries(groups).map(([words, belongs]) => {
    const names = exercises.filter(belongs).map((each) => each.name).join(" ");
    return make("li", { textContent: `${words}: ${names || "none"}` });
  }));
  get("kept").textContent = refused
    ? "This browser keeps nothing: download what you have written before you leave."
    : "What you write stays in this browser, on this machine. Download it to hand it in, or to go on elsewhere.";
}

// ---------------------------------------------------------------------------------------- the check

async function check() {
  if (running || current.torch) return;
  running = current;
  const question = { exercise: current.key, code: editor.text }, { key } = current;
  delete results[key];
  busy(true);
  showResult();
  try {
    say(python.loaded ? "Checking ..." : "Python is loading; then it checks ...");
    python.ready.then(() => running && say("Checking ..."));
    const answer = await python.ask({ call: "check", ...question }, (told) => say(`Checking: ${told} ...`));
    results[key] = answer;
    if (answer.passed && textOf(running) === question.code) keep(`${running.file} passed`, "");
    say("");
    showResult();
    progress();
    if (answer.draw) {
      say("Drawing ...");
      results[key].picture = await python.ask({ call: "picture", ...question });
      say("");
    }
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    say("");
    results[key] = results[key] ? { ...results[key], picture: { error: error.message } } : { error: error.message };
  }
  running = null;
  busy(false);
  showResult();
  get("result").scrollIntoView({ block: "nearest" });
  document.body.dataset.checked = Number(document.body.dataset.checked || 0) + 1;
}

function busy(is) {
  get("check").ariaDisabled = is; // not disabled: that would take the focus away
  get("stop").hidden = !is;
}

function say(text) {
  get("status").className = "";
  get("status").textContent = text;
}

function showResult() {
  const result = results[current.key], place = get("result"), figure = get("picture");
  place.hidden = !result;
  figure.hidden = !result?.picture;
  if (!result) return;
  place.className = result.passed ? "good" : "bad";
  place.replaceChildren(...(result.error ? [make("p", { textContent: result.error })] : verdict(result)));
  const next = exercises.slice(exercises.indexOf(current) + 1).find((each) => !each.torch);
  if (result.passed && next) place.append(make("a", { href: `#${next.key}` }, `Next: ${next.name} ${next.title}`));
  if (figure.hidden) return;
  const { svg, error } = result.picture;
  figure.firstChild.hidden = Boolean(error);
  figure.lastChild.textContent = error ?? "The picture always shows this one case.";
  if (svg) figure.firstChild.replaceChildren(...svg.map((each) => document.importNode(
    new DOMParser().parseFromString(each, "image/svg+xml").documentElement, true)));
}

// A verdict, in the words of the command line.
function verdict({ lines, failure, score }) {
  const [head, ...rest] = lines;
  if (!failure || !rest.length) {
    return [make("h3", { textContent: head }), ...(score ? [make("p", { textContent: `score: ${score}` })] : [])];
  }
  const list = (...pairs) => make("dl", {}, ...pairs.flatMap(([word, text]) =>
    [make("dt", { textContent: word }), make("dd", { textContent: text })]));
  const found = [make("h3", { textContent: head }), list(["The smallest case found", failure.where])];
  const [header, ...rows] = failure.table;
  if (header) {
    const row = (cells, kind) => make("tr", {}, ...cells.map((cell) => make(kind, { textContent: plain(cell) })));
    const table = make("table", {}, make("thead", {}, row(header, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
    found.push(make("div", { className: "scroll", role: "region", tabIndex: 0, ariaLabel: "The case as a table" }, table));
  }
  found.push(list(["Expected", failure.expected], ["Got", failure.got]));
  if (failure.teaches) found.push(make("p", { className: "teaches", textContent: failure.teaches }));
  return found;
}

const plain = (cell) => (typeof cell === "string" ? cell : JSON.stringify(cell));

// ------------------------------------------------------------------------------- files in and out

async function save() {
  const files = Object.fromEntries(exercises.map((each) => [each.file, textOf(each)]));
  const { zip, error } = await python.ask({ call: "pack", files });
  if (error) throw new Problem(`${error}.`);
  const data = Uint8Array.from(atob(zip), (letter) => letter.charCodeAt(0));
  const address = URL.createObjectURL(new Blob([data], { type: "application/zip" }));
  make("a", { href: address, download: "submission.zip" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

async function open() {
  const found = {};
  for (const file of get("files").files) {
    const data = new Uint8Array(await file.arrayBuffer());
    if (data.length > 1 << 20) throw new Problem(`${file.name} is longer than 1 MiB.`);
    if (file.name.endsWith(".zip")) {
      const zip = btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join(""));
      const answer = await python.ask({ call: "unpack", zip });
      if (answer.error) throw new Problem(`${file.name}: ${answer.error}.`);
      Object.assign(found, answer.files);
    } else {
      try {
        found[file.name] = new TextDecoder("utf-8", { fatal: true }).decode(data);
      } catch {
        throw new Problem(`${file.name} is no text.`);
      }
    }
  }
  const ours = exercises.map((each) => each.file);
  const [known, other] = [true, false].map((is) => Object.keys(found).filter((name) => ours.includes(name) === is));
  const lost = known.filter((name) => ![null, found[name]].includes(kept(name))).join(", ");
  if (lost && !confirm(`This replaces what is kept here: ${lost}. Go on?`)) return "Nothing was opened.";
  for (const name of known) {
    const exercise = exercises.find((each) => each.file === name);
    write(exercise, found[name]);
    delete results[exercise.key];
  }
  show();
  return [known.length ? `Opened: ${known.join(", ")}.` : "", other.length ? `No exercise has this name: ${other.join(", ")}.` : ""].join(" ").trim();
}

// Does something with files, and says what went wrong.
async function filing(work) {
  try {
    get("opened").textContent = python.loaded ? "" : "Python is loading ...";
    get("opened").textContent = (await work()) ?? "";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    get("opened").textContent = error.message;
  }
}

// ------------------------------------------------------------------------------------------- start

async function plainField(parent, label, changed, run) {
  const field = make("textarea", { rows: 24, spellcheck: false, autocapitalize: "off", ariaLabel: label });
  field.oninput = () => changed(field.value);
  field.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  };
  parent.append(field);
  return { get text() { return field.value; }, set text(text) { field.value = text; } };
}

async function start() {
  manifest = await readManifest("python -m course page");
  if (!manifest) return;
  exercises = manifest.exercises;
  python = new Python(manifest, location.href, { limit: LIMIT, endless: () => ENDED });
  python.ready.then(() => { document.body.dataset.python = "ready"; }, (error) => !running && say(error.message));
  const { makeEditor } = manifest.editor ? await import("./editor.js") : { makeEditor: plainField };
  editor = await makeEditor(get("editor"), "Your Python", (text) => catchUp() || write(current, text), check);
  get("list").append(...exercises.map(({ key, name, title }) => make("li", {},
    make("a", { href: `#${key}` }, name, make("i", {}, ` ${title}`), make("span")))));
  get("check").onclick = check;
  get("stop").onclick = () => python.stop("Stopped.");
  get("hint").onclick = () => {
    keep(`${current.file} hints`, String(Number(kept(`${current.file} hints`) ?? 0) + 1));
    showHints();
  };
  get("again").onclick = () => {
    if (catchUp() || !isWritten(current) || !confirm(`This removes what you have written for ${current.name}. Go on?`)) return;
    write(current, current.stub);
    delete results[current.key];
    show();
  };
  get("save").onclick = () => filing(save);
  get("open").onclick = () => get("files").click();
  get("files").onchange = () => filing(open).then(() => { get("files").value = ""; });
  window.onhashchange = show;
  window.onstorage = window.onpageshow = catchUp; // pageshow: a page that was left hears of nothing
  for (const each of document.querySelectorAll("nav, main")) each.hidden = false;
  show();
  say("");
}

start();
