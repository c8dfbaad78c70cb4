// The editor: CodeMirror 6, https://codemirror.net. course/page.py bundles it into one file.

import { closeBrackets, closeBracketsKeymap } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { bracketMatching, HighlightStyle, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { EditorState } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";

const LOOKS = HighlightStyle.define([ // colours are in page.css, for light and dark
  { tag: [tags.keyword, tags.operatorKeyword, tags.self], color: "var(--keyword)" },
  { tag: [tags.string, tags.docString], color: "var(--string)" },
  { tag: tags.comment, color: "var(--soft)", fontStyle: "italic" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--number)" },
  { tag: [tags.function(tags.definition(tags.variableName)), tags.definition(tags.className)], color: "var(--name)" },
]);

// A text field for Python. changed: called after each change of the user's. run: Ctrl-Enter.
export function makeEditor(parent, label, changed, run) {
  const own = [{ key: "Mod-Enter", run: () => { run(); return true; } }, indentWithTab];
  const extensions = [
    lineNumbers(), history(), drawSelection(), indentOnInput(), bracketMatching(), closeBrackets(),
    highlightActiveLine(), EditorView.lineWrapping, indentUnit.of("    "), python(), syntaxHighlighting(LOOKS),
    keymap.of([...own, ...closeBracketsKeymap, ...defaultKeymap, ...historyKeymap]),
    EditorView.contentAttributes.of({ "aria-label": label }),
    EditorView.updateListener.of((update) => {
      if (update.docChanged && !setting) changed(update.state.doc.toString());
    }),
  ];
  let setting = false;
  const view = new EditorView({ parent });
  view.scrollDOM.tabIndex = 0; // what scrolls can have the focus
  return {
    get text() {
      return view.state.doc.toString();
    },
    set text(doc) { // a new document: nobody undoes into another exercise
      setting = true;
      view.setState(EditorState.create({ doc, extensions }));
      setting = false;
    },
  };
}
