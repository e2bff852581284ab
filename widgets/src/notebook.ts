// The panel and the notebook that it stands in.
//
// After a reload the page no longer knows which output belongs to the panel, and the kernel's last picture
// finds no place. Then the page puts the picture into the notebook itself, where the host lets it.
//
// JupyterLab's widget manager carries the notebook's model as `context.model`. That is not a documented interface, so
// every step is looked at before it is taken, and a host without it simply has no notebook here.

import type { MimeBundle } from "./wire";

interface OutputModel {
  data?: Record<string, unknown>;
  metadata: { nbgpu?: { slot?: string; final?: string; button?: boolean } };
}

interface OutputList {
  length: number;
  get(index: number): OutputModel;
  set(index: number, output: object): void;
}

export interface Place {
  /** The id of the run whose picture it is; empty where it is none. */
  final: string;
  put(data: MimeBundle, metadata: MimeBundle): void;
  /** Adds HTML below what is there. */
  append(html: string): void;
}

function isOutputList(value: unknown): value is OutputList {
  const list = value as Partial<OutputList> | undefined;
  return typeof list?.length === "number" && typeof list.get === "function" && typeof list.set === "function";
}

/** Whether the host has a notebook that can be looked through at all. */
export function hasNotebook(manager: unknown): boolean {
  return cellsOf(manager) !== undefined;
}

interface Host {
  context?: { model?: { cells?: unknown; dirty?: boolean }; save?: () => Promise<void> };
}

/**
 * Saves the notebook if it has changed. A page that is reloaded shows what was saved last, and a panel that was not
 * in it would be gone, although its run goes on.
 */
export function saveNotebook(manager: unknown): void {
  const context = (manager as Host | undefined)?.context;
  if (context?.model?.dirty !== true || typeof context.save !== "function") return;
  context.save().catch((error: unknown) => console.warn("nbgpu: the notebook could not be saved", error));
}

function cellsOf(manager: unknown): Iterable<{ outputs?: unknown }> | undefined {
  const cells = (manager as Host | undefined)?.context?.model?.cells;
  const iterable = cells !== null && typeof cells === "object" && Symbol.iterator in cells;
  return iterable ? (cells as Iterable<{ outputs?: unknown }>) : undefined;
}

/**
 * Empties the outputs with buttons of the cell in which `slot` is. The kernel takes its buttons away by itself, but not
 * from a page that was reloaded meanwhile.
 */
export function takeButtonsAway(manager: unknown, slot: string): void {
  for (const cell of cellsOf(manager) ?? []) {
    const outputs = cell.outputs;
    if (!isOutputList(outputs)) continue;
    const marks = Array.from({ length: outputs.length }, (_, index) => outputs.get(index).metadata?.nbgpu);
    if (!marks.some((mark) => mark?.slot === slot)) continue;
    marks.forEach((mark, index) => {
      if (mark?.button) outputs.set(index, { output_type: "display_data", data: {}, metadata: {} });
    });
  }
}

/** The output in the notebook whose metadata names `slot`. */
export function findPlace(manager: unknown, slot: string): Place | undefined {
  for (const cell of cellsOf(manager) ?? []) {
    const outputs = cell.outputs;
    if (!isOutputList(outputs)) continue;
    for (let index = 0; index < outputs.length; index++) {
      const { data: before = {}, metadata: about } = outputs.get(index);
      const mark = about?.nbgpu;
      if (mark?.slot !== slot) continue;
      const put: Place["put"] = (data, metadata) => outputs.set(index, { output_type: "display_data", data, metadata });
      const append = (html: string): void => {
        const above = before["text/html"] ?? "";
        put({ ...before, "text/html": `${Array.isArray(above) ? above.join("") : above}${html}` }, { nbgpu: { ...mark } });
      };
      return { final: mark.final ?? "", put, append };
    }
  }
  return undefined;
}
