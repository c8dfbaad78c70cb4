// Python in a browser: loads Pyodide and the repository's own files, and answers questions.
//
// A worker, so that the page never waits, and can end what never ends. Each file is checked against
// the hash that the manifest gives. `ask` is web/explorer.py's `answer`.

let ask = null;

self.onmessage = async ({ data }) => {
  if (data.manifest) {
    try {
      self.postMessage({ ready: await boot(data.manifest) });
    } catch (error) {
      self.postMessage({ failed: String(error.message || error) });
    }
  } else {
    self.postMessage({ id: data.id, answer: answerOf(data.question) });
  }
};

function answerOf(question) {
  try {
    return JSON.parse(ask(JSON.stringify(question)));
  } catch (error) { // what Python does not catch, such as SystemExit: the last line says what it is
    return { error: String(error.message || error).trim().split("\n").at(-1) };
  }
}

async function boot({ book, pyodide }) {
  const from = new URL(pyodide.from, self.location.href).href;
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
  const { loadPyodide } = await imported(`${from}pyodide.mjs`);
  const { default: createPyodideModule } = await imported(`${from}pyodide.asm.mjs`);
  const python = await loadPyodide({ indexURL: from, createPyodideModule });
  await Promise.all(Object.entries(book).map(async ([path, integrity]) => {
    const response = await plain(`book/${path}`, { integrity });
    if (!response.ok) throw new Error(`book/${path}: ${response.status}`);
    const place = `/book/${path}`;
    python.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")));
    python.FS.writeFile(place, new Uint8Array(await response.arrayBuffer()));
  }));
  python.runPython("import sys; sys.path.insert(0, '/book'); from web import explorer");
  ask = python.runPython("lambda text: explorer.answer(text, explorer.IN_BROWSER)");
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
