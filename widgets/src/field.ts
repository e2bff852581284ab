// One field of the control panel. The kernel says what stands in it, what it means and what is wrong with it; this tells
// the kernel what was typed, as text and just as it was typed.

import { element, setText } from "./dom";

/** The part of anywidget's model that is used here. */
export interface FieldModel {
  get(name: "kind" | "label" | "value" | "meaning" | "problem" | "empty"): string;
  get(name: "disabled"): boolean;
  get(name: "choices"): string[];
  set(name: "value", value: string): void;
  save_changes(): void;
  on(event: string, callback: () => void): void;
  off(event: string, callback: () => void): void;
}

type Control = HTMLInputElement | HTMLSelectElement;

const SHOWN = ["label", "value", "meaning", "problem", "disabled"] as const;

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
  const options = model
    .get("choices")
    .map((choice) => element("option", "", { value: choice }, choice || model.get("empty")));
  return element("select", "", {}, ...options);
}

function isSwitch(control: Control): control is HTMLInputElement {
  return control instanceof HTMLInputElement && control.type === "checkbox";
}

/** Puts the field into `root`; returns what takes it away. The looks are those of ipywidgets' own controls. */
export function show(model: FieldModel, root: HTMLElement): () => void {
  const id = newId();
  const control = makeControl(model);
  control.id = id;
  const label = element("label", "widget-label", { for: id });
  // A message that appears is read out only where its element was there before.
  const problem = element("div", "nbgpu-problem", { id: `${id}-problem`, role: "alert" });
  const meaning = element("span", "", { id: `${id}-meaning`, hidden: "" });
  control.setAttribute("aria-describedby", `${problem.id} ${meaning.id}`);
  const looks = { text: "widget-text", choice: "widget-dropdown", switch: "nbgpu-switch" }[model.get("kind")];
  const row = element("div", `jupyter-widgets widget-inline-hbox ${looks}`, {}, label, control);
  root.classList.add("nbgpu-field");
  root.replaceChildren(row, problem, meaning);

  const draw = (): void => {
    const value = model.get("value");
    if (isSwitch(control)) control.checked = value === "True";
    else if (control.value !== value) control.value = value;
    control.disabled = model.get("disabled");
    setText(label, model.get("label"));
    setText(meaning, model.get("meaning"));
    row.title = model.get("meaning");
    const wrong = model.get("problem");
    setText(problem, wrong);
    if (wrong) control.setAttribute("aria-invalid", "true");
    else control.removeAttribute("aria-invalid");
  };
  const take = (): void => {
    const typed = isSwitch(control) ? (control.checked ? "True" : "False") : control.value;
    model.set("value", typed);
    model.save_changes();
  };
  const focus = (): void => control.focus();
  control.addEventListener("change", take);
  for (const name of SHOWN) model.on(`change:${name}`, draw);
  model.on("msg:custom", focus);
  draw();
  return () => {
    for (const name of SHOWN) model.off(`change:${name}`, draw);
    model.off("msg:custom", focus);
  };
}

function render({ model, el }: { model: FieldModel; el: HTMLElement }): () => void {
  return show(model, el);
}

export default { render };
