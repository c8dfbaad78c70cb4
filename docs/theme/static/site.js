// What the theme leaves to do. The pages that are not the theme's load this, too.

function kept(name, text) { // in this browser, if it keeps anything; text: what it is to keep
  try {
    if (text !== undefined) localStorage.setItem(name, text);
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

// What a reader has chosen with the theme's button holds there, too.
if (!document.body.dataset.theme) {
  document.documentElement.style.colorScheme = { light: "light", dark: "dark" }[kept("theme")] ?? "";
}

// For those who read with the keyboard or a screen reader.
for (const box of document.querySelectorAll("article pre, .table-wrapper")) {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; // so that arrow keys scroll it
}
for (const each of document.querySelectorAll("summary")) each.removeAttribute("aria-label"); // its words say it
for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";

// A cell tagged `predict`: its reader says what comes, and then sees the output below it, and what
// explains it: outputs of cells, then the text up to the next cell, heading or thing to do.
document.querySelectorAll(".tag_predict > .cell_output").forEach((output) => {
  const code = output.previousElementSibling.textContent.trim();
  const name = `nano-sarathi-prediction/${location.pathname.split("/").at(-1)} ${code.slice(-80)}`;
  const outputs = [output];
  let each = output.parentElement;
  while ((each = each.nextElementSibling)?.matches(".cell:not(.tag_predict)")) {
    outputs.push(...each.querySelectorAll(":scope > .cell_output"));
  }
  for (; each && !each.matches("section, .cell"); each = each.nextElementSibling) {
    if (/^(Now|Predict|Your) /.test(each.textContent)) break;
    outputs.push(each);
  }
  const place = document.createElement("div");
  place.className = "prediction";
  place.innerHTML = `<label>Your prediction <textarea rows="2"></textarea></label><button type="button"></button>`;
  const [{ lastChild: field }, button] = place.children;
  field.value = kept(name) ?? "";
  field.oninput = () => kept(name, field.value);
  button.onclick = () => {
    const hidden = !output.hidden;
    button.ariaExpanded = !hidden;
    button.textContent = `${hidden ? "Show" : "Hide"} the output`;
    for (const each of outputs) each.hidden = hidden;
  };
  button.onclick();
  output.before(place);
});
