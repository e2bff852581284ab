// The buttons of the control panel that copy its settings, as code and as a command.

import { element, setText } from "./dom";

type Text = "code" | "command" | "problem";

/** The part of anywidget's model that is used here. */
export interface CopyModel {
  get(name: Text): string;
}

/** How long it is said that something was copied. */
const SAID_MS = 4000;

/** Puts the buttons into `root`; returns what takes them away. */
export function show(model: CopyModel, root: HTMLElement, clipboard: Clipboard | undefined = navigator.clipboard): () => void {
  const said = element("span", "nbgpu-said", { role: "status" });
  const text = element("textarea", "nbgpu-copied", { readonly: "", rows: "5", spellcheck: "false", hidden: "" });
  let timer: ReturnType<typeof setTimeout> | undefined;

  const say = (words: string, forGood = false): void => {
    clearTimeout(timer);
    setText(said, words);
    if (!forGood) timer = setTimeout(() => setText(said, ""), SAID_MS);
  };
  const copy = async (kind: "code" | "command"): Promise<void> => {
    text.hidden = true;
    const problem = model.get("problem");
    if (problem) return say(problem, true);
    const wanted = model.get(kind);
    try {
      // There is none on pages that are neither local nor encrypted.
      if (!clipboard) throw new Error("no clipboard");
      await clipboard.writeText(wanted);
      say(kind === "code" ? "Copied: paste it into a cell" : "Copied: paste it into a terminal");
    } catch {
      // The browser or the person has denied it, which is theirs to do: here it can be copied by hand.
      text.value = wanted;
      text.setAttribute("aria-label", kind === "code" ? "The settings as code" : "The settings as a command");
      text.hidden = false;
      text.focus();
      text.select();
      say("This page may not use the clipboard: copy the selected text", true);
    }
  };
  const button = (label: string, kind: "code" | "command"): HTMLButtonElement => {
    const made = element("button", "jupyter-widgets jupyter-button widget-button", { type: "button" }, label);
    made.addEventListener("click", () => void copy(kind));
    return made;
  };
  const buttons = element(
    "div",
    "nbgpu-copy-row",
    {},
    button("Copy as code", "code"),
    button("Copy as command", "command"),
    said,
  );
  root.classList.add("nbgpu-copy");
  root.replaceChildren(buttons, text);
  return () => clearTimeout(timer);
}

function render({ model, el }: { model: CopyModel; el: HTMLElement }): () => void {
  return show(model, el);
}

export default { render };
