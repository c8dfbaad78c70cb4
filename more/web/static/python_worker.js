// Python in a browser: loads Pyodide and the repository's own files, and answers questions.
//
// A worker, so that the page never waits, and can end what never ends (python.js does both). Each
// file is checked against the hash that the manifest gives. `ask` is `in_browser` of the manifest's
// module: a question in, an answer out, both as JSON. What it tells on the way goes to the page.

let ask = null;

self.onmessage = async ({ data }) => {
  if (data.manifest) {
    try {
      self.postMessage({ ready: await boot(data.manifest, data.base) });
    } catch (error) {
      self.postMessage({ failed: String(error.message || error) });
    }
  } else {
    self.postMessage({ id: data.id, answer: answerOf(data.question, (told) => self.postMessage({ id: data.id, told })) });
  }
};

function answerOf(question, tell) {
  try {
    return JSON.parse(ask(JSON.stringify(question), tell));
  } catch (error) { // what Python does not catch, such as SystemExit: the last line says what it is
    return { error: String(error.message || error).trim().split("\n").at(-1) };
  }
}

// base: the address of the manifest, which all others are relative to.
async function boot({ start, book, pyodide }, base) {
  const from = new URL(pyodide.from, base).href;
  const plain = self.fetch.bind(self);
  self.fetch = async (resource, options) => { // Pyodide's own, too
    const url = String(resource.url || resource);
    const name = url.startsWith(from) ? url.slice(from.length) : "";
    if (!(name in pyodide.files)) throw new Error(`${url} is no file of the manifest`);
    const response = await plain(url, { ...options, integrity: pyodide.files[name] });
    if (!response.ok || !name.endsWith(".wasm")) return response;
    // Some web servers do not know this type, and without it Pyodide waits for ever.
    return new Response(response.body, { headers: { "Content-Type": "application/wasm" } });
  };
  const files = Promise.all(Object.entries(book).map(async ([path, integrity]) => {
    const response = await plain(new URL(`book/${path}`, base), { integrity });
    if (!response.ok) throw new Error(`book/${path}: ${response.status}`);
    return [`/book/${path}`, new Uint8Array(await response.arrayBuffer())];
  }));
  files.catch(() => {}); // said below, and if Pyodide is missing that comes first
  const { loadPyodide } = await imported(`${from}pyodide.mjs`);
  const { default: createPyodideModule } = await imported(`${from}pyodide.asm.mjs`);
  const python = await loadPyodide({ indexURL: from, createPyodideModule });
  for (const [place, data] of await files) {
    python.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")));
    python.FS.writeFile(place, data);
  }
  ask = python.runPython(`import sys; sys.path.insert(0, "/book"); from ${start} import in_browser; in_browser`);
  return python.runPython("sys.version.split()[0]");
}

async function imported(url) { // `import` itself cannot check a hash
  const response = await self.fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status}`);
  const script = new Blob([await response.text()], { type: "text/javascript" });
  const place = URL.createObjectURL(script);
  try {
    return await import(place);
  } finally {
    URL.revokeObjectURL(place);
  }
}
