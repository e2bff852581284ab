// After a reload the page no longer knows which output belongs to the panel, and the kernel's last picture
// finds no place. Then the page puts the picture into the notebook itself, where the host lets it.
//
// JupyterLab's widget manager carries the notebook's model as `context.model`. That is not a documented interface, so
// every step is looked at before it is taken, and a host without it simply has no notebook here.

import type { MimeBundle } from "./wire";

interface OutputModel {
  metadata: { nbgpu?: { slot?: string; final?: boolean } };
}

interface OutputList {
  length: number;
  get(index: number): OutputModel;
  set(index: number, output: object): void;
}

export interface Place {
  final: boolean;
  put(data: MimeBundle, metadata: MimeBundle): void;
}

function isOutputList(value: unknown): value is OutputList {
  const list = value as Partial<OutputList> | undefined;
  return typeof list?.length === "number" && typeof list.get === "function" && typeof list.set === "function";
}

/** Whether the host has a notebook that can be looked through at all. */
export function hasNotebook(manager: unknown): boolean {
  return cellsOf(manager) !== undefined;
}

function cellsOf(manager: unknown): Iterable<{ outputs?: unknown }> | undefined {
  const cells = (manager as { context?: { model?: { cells?: unknown } } } | undefined)?.context?.model?.cells;
  const iterable = cells !== null && typeof cells === "object" && Symbol.iterator in cells;
  return iterable ? (cells as Iterable<{ outputs?: unknown }>) : undefined;
}

/** The output in the notebook whose metadata names `slot`. */
export function findPlace(manager: unknown, slot: string): Place | undefined {
  for (const cell of cellsOf(manager) ?? []) {
    const outputs = cell.outputs;
    if (!isOutputList(outputs)) continue;
    for (let index = 0; index < outputs.length; index++) {
      const mark = outputs.get(index).metadata?.nbgpu;
      if (mark?.slot !== slot) continue;
      return {
        final: mark.final === true,
        put: (data, metadata) => outputs.set(index, { output_type: "display_data", data, metadata }),
      };
    }
  }
  return undefined;
}
