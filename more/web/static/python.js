// Python for a page: a worker that answers its questions, and that can be ended.
//
//     const python = new Python(manifest, base);       // manifest.json of more/web/bundle.py, its address
//     const answer = await python.ask({ call: ... });  // what `in_browser` of its module answers
//
// An answer that takes too long ends the worker, and a new one starts. `stop` does so at once.

import { get, Problem } from "./dom.js";

export const LIMIT = 10000; // ms of one answer, or between two things that it tells

// The page's manifest, or nothing: then its status says what writes it.
export async function readManifest(command) {
  const found = await fetch("manifest.json").then((response) => response.ok && response.json()).catch(() => null);
  const textContent = `manifest.json is missing beside this page: ${command} writes both.`;
  if (!found) Object.assign(get("status"), { className: "bad", textContent });
  return found;
}

export class Python {
  // limit: ms. endless: what is said when they are over.
  constructor(manifest, base, { limit = LIMIT, endless = () => tooLong(limit) } = {}) {
    Object.assign(this, { manifest, base: new URL(base, location.href).href, limit, endless });
    this.start();
  }

  start() {
    this.waiting = new Map(); // number -> who waits for its answer
    this.number = 0;
    this.loaded = false;
    this.worker = new Worker(new URL("python_worker.js", import.meta.url), { type: "module" });
    this.ready = new Promise((resolve, reject) => {
      this.waiting.set("ready", { reject }); // ended while it starts
      this.worker.onerror = () => reject(this.unreachable("the worker cannot start"));
      this.worker.onmessage = ({ data }) => {
        if (data.ready) {
          this.loaded = true;
          resolve(data.ready);
        } else if (data.failed) {
          reject(this.unreachable(data.failed));
        } else if ("told" in data) {
          this.waiting.get(data.id)?.told(data.told);
        } else {
          this.waiting.get(data.id)?.resolve(data.answer);
        }
      };
    });
    this.ready.catch(() => {});
    this.worker.postMessage({ manifest: this.manifest, base: this.base });
  }

  // tell: hears what Python tells on the way; each time, the limit counts anew.
  async ask(question, tell = () => {}) {
    await this.ready;
    const id = this.number++;
    let timer;
    try {
      return await new Promise((resolve, reject) => {
        const wait = () => {
          clearTimeout(timer);
          timer = setTimeout(() => this.stop(this.endless()), this.limit);
        };
        const told = (text) => {
          wait();
          tell(text);
        };
        this.waiting.set(id, { resolve, reject, told });
        wait();
        this.worker.postMessage({ id, question });
      });
    } finally {
      clearTimeout(timer);
      this.waiting.delete(id);
    }
  }

  // End what runs, and start again. why: what those who wait are told.
  stop(why) {
    this.end(why);
    this.start();
  }

  end(why) {
    this.worker.terminate();
    for (const { reject } of this.waiting.values()) reject(new Problem(why));
  }

  get name() {
    return this.ready.then((version) => `Python ${version} in this browser (Pyodide ${this.manifest.pyodide.version})`);
  }

  unreachable(why) {
    const { version, from } = this.manifest.pyodide;
    const { again } = this.manifest; // the command that puts Pyodide beside the page
    const remedy = again ? `connect to the network, or put it beside this page: ${again} --pyodide FOLDER` : "connect to the network";
    return new Problem(`This page needs Pyodide ${version}, Python for browsers. It cannot be loaded from ${from}: ${remedy}. (${why})`);
  }
}

const tooLong = (limit) => `This takes more than ${limit / 1000} s, so it was stopped.`;
