// One field of the control panel. The kernel says what stands in it, what it means and what is wrong with it; this tells
// the kernel what was typed, as text and just as it was typed: as a draft while the person types, which the kernel only
// judges, and as the value when they are done.

import { element, setText } from "./dom";
import { attachHelp, makeHelp } from "./help";

type Text = "kind" | "label" | "name" | "unit" | "value" | "standard" | "meaning" | "problem" | "note" | "origin" | "empty";

/** The part of anywidget's model that is used here. */
export interface FieldModel {
  get(name: Text): string;
  get(name: "disabled" | "changed" | "warns" | "idle"): boolean;
  get(name: "choices" | "choice_labels"): string[];
  set(name: "value" | "draft", value: string): void;
  save_changes(): void;
  send(content: { type: "reset" } | { type: "take"; value: string }): void;
  on(event: string, callback: () => void): void;
  off(event: string, callback: () => void): void;
}

type Control = HTMLInputElement | HTMLSelectElement;

const SHOWN = [
  "label",
  "value",
  "standard",
  "meaning",
  "problem",
  "note",
  "origin",
  "warns",
  "disabled",
  "changed",
  "idle",
] as const;
const OPTIONS = ["choices", "choice_labels"] as const;

/** So long a person must pause for what they have typed to be judged. */
const PAUSE_MS = 250;

/** How many fields the page has had: each of them loads this script for itself. */
const COUNT = Symbol.for("nbgpu.fields");

function newId(): string {
  const page = globalThis as unknown as Record<symbol, number | undefined>;
  page[COUNT] = (page[COUNT] ?? 0) + 1;
  return `nbgpu-field-${page[COUNT]}`;
}

function makeControl(model: FieldModel): Control {
  const kind = model.get("kind");
  if (kind === "switch") return element("input", "", { type: "checkbox" });
  if (kind === "text") {
    return element("input", "widget-input", { type: "text", placeholder: model.get("empty"), spellcheck: "false" });
  }
  return element("select", "");
}

function fillOptions(control: Control, model: FieldModel): void {
  if (!(control instanceof HTMLSelectElement)) return;
  const labels = model.get("choice_labels") ?? [];
  const options = model
    .get("choices")
    .map((choice, i) => element("option", "", { value: choice }, labels[i] || choice || model.get("empty")));
  control.replaceChildren(...options);
  control.value = model.get("value");
}

function isSwitch(control: Control): control is HTMLInputElement {
  return control instanceof HTMLInputElement && control.type === "checkbox";
}

/** Puts the field into `root`; returns what takes it away. The control looks as ipywidgets' own do. */
export function show(model: FieldModel, root: HTMLElement): () => void {
  const id = newId();
  const control = makeControl(model);
  control.id = id;
  fillOptions(control, model);
  const label = element("label", "nbgpu-label", { for: id });
  const unit = element("span", "nbgpu-unit", { id: `${id}-unit` }, model.get("unit") ?? "");
  const origin = element("span", "nbgpu-origin", { id: `${id}-origin` });
  const note = element("div", "nbgpu-note", { id: `${id}-note` });
  const state = element("span", "", { id: `${id}-state`, hidden: "" });
  const { help, meaning, code } = makeHelp(`${id}-meaning`);
  // The keyboard and screen readers have the help with the control itself.
  const mark = element("button", "nbgpu-mark", { type: "button", tabindex: "-1", "aria-hidden": "true" }, "?");
  const reset = element("button", "nbgpu-reset", { type: "button" }, "↺");
  // A screen reader reads an alert when it appears, so that there is none before.
  const problem = element("div", "nbgpu-problem", { id: `${id}-problem`, role: "alert" });
  const described = [problem, unit, meaning, origin, note, state].map((each) => each.id).join(" ");
  control.setAttribute("aria-describedby", described);
  const looks = { text: "widget-text", choice: "widget-dropdown", switch: "nbgpu-switch" }[model.get("kind")];
  const head = element("div", "nbgpu-head", {}, label, mark, origin);
  const row = element("div", `jupyter-widgets nbgpu-row ${looks}`, {}, control, unit);
  root.classList.add("nbgpu-field");
  // The way back comes after what it takes back, also for the keyboard; the page shows it beside the name.
  root.replaceChildren(head, row, reset, note, state, help);

  /** Whether something is typed that the kernel does not have as the value. */
  let isTyping = false;
  let pause: ReturnType<typeof setTimeout> | undefined;

  const draw = (): void => {
    const value = model.get("value");
    if (isSwitch(control)) control.checked = value === "True";
    else if (!isTyping && control.value !== value) control.value = value;
    control.disabled = reset.disabled = model.get("disabled");
    setText(label, model.get("label"));
    setText(meaning, model.get("meaning"));
    const standard = model.get("standard") || model.get("empty") || "empty";
    const name = model.get("name");
    setText(code, name ? `${name}, by default ${standard}` : "");
    setText(note, model.get("note") ?? "");
    note.classList.toggle("nbgpu-warns", Boolean(model.get("warns")));
    const changed = Boolean(model.get("changed"));
    root.classList.toggle("nbgpu-changed", changed);
    reset.hidden = !changed;
    const back = `Reset ${model.get("label")} to ${standard}`;
    reset.setAttribute("aria-label", back);
    reset.title = back;
    setText(origin, model.get("origin") ?? "");
    const idle = Boolean(model.get("idle"));
    root.classList.toggle("nbgpu-idle", idle);
    setText(state, [changed ? "changed" : "", idle ? "not used now" : ""].filter(Boolean).join(", "));
    const wrong = model.get("problem");
    setText(problem, wrong);
    if (wrong) {
      control.setAttribute("aria-invalid", "true");
      if (!problem.isConnected) row.after(problem);
    } else {
      control.removeAttribute("aria-invalid");
      problem.remove();
    }
  };
  const take = (): void => {
    clearTimeout(pause);
    isTyping = false;
    const typed = isSwitch(control) ? (control.checked ? "True" : "False") : control.value;
    model.set("draft", typed);
    model.set("value", typed);
    model.save_changes();
    // While the kernel has not answered the last change, the page keeps this one back, but no press of a button:
    // that would come first, and act on the value before. A message of its own is sent at once.
    model.send({ type: "take", value: typed });
  };
  const judge = (): void => {
    model.set("draft", control.value);
    model.save_changes();
  };
  const type = (): void => {
    if (isSwitch(control) || control instanceof HTMLSelectElement) return;
    isTyping = true;
    clearTimeout(pause);
    pause = setTimeout(judge, PAUSE_MS);
  };
  // What is typed and taken back again is no change, and was judged all the same.
  const leave = (): void => void (isTyping && take());
  const focus = (): void => control.focus();
  const refill = (): void => fillOptions(control, model);
  const takeBack = (): void => {
    model.send({ type: "reset" });
    // The button vanishes, and the keyboard with it.
    control.focus();
  };
  control.addEventListener("input", type);
  control.addEventListener("change", take);
  control.addEventListener("blur", leave);
  reset.addEventListener("click", takeBack);
  for (const name of SHOWN) model.on(`change:${name}`, draw);
  for (const name of OPTIONS) model.on(`change:${name}`, refill);
  model.on("msg:custom", focus);
  const detach = attachHelp(root, mark, help);
  draw();
  return () => {
    clearTimeout(pause);
    detach();
    for (const name of SHOWN) model.off(`change:${name}`, draw);
    for (const name of OPTIONS) model.off(`change:${name}`, refill);
    model.off("msg:custom", focus);
  };
}

function render({ model, el }: { model: FieldModel; el: HTMLElement }): () => void {
  return show(model, el);
}

export default { render };
