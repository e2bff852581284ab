// Shows the page that stands beside a widget in a saved notebook, where the widget ended with its kernel. JupyterLab
// would show "Error displaying widget: model not found" in its place.
import type { ICodeCellModel } from "@jupyterlab/cells";
import type { NotebookPanel } from "@jupyterlab/notebook";
import type { JSONObject } from "@lumino/coreutils";

const WIDGET = "application/vnd.jupyter.widget-view+json";

/** An output of nbgpu with a widget, and its place in a cell. */
interface KeptWidget {
  cell: ICodeCellModel;
  index: number;
  id: string;
}

function keptWidgets(panel: NotebookPanel): KeptWidget[] {
  const kept: KeptWidget[] = [];
  for (const cell of panel.context.model.cells) {
    if (cell.type !== "code") continue;
    const { outputs } = cell as ICodeCellModel;
    for (let index = 0; index < outputs.length; index++) {
      const { data, metadata } = outputs.get(index);
      const view = data[WIDGET] as { model_id?: string } | undefined;
      if (metadata["nbgpu"] && view?.model_id) kept.push({ cell: cell as ICodeCellModel, index, id: view.model_id });
    }
  }
  return kept;
}

/** Takes the widgets of an opened notebook out of its outputs unless its kernel still has them. */
export async function showKeptPages(panel: NotebookPanel): Promise<void> {
  await panel.context.ready;
  // A cell that runs meanwhile has widgets of its own.
  const saved = new Set(keptWidgets(panel).map(({ id }) => id));
  if (!saved.size) return;
  await panel.sessionContext.ready;
  // A widget and its comm have one id.
  const reply = await panel.sessionContext.session?.kernel?.requestCommInfo({ target_name: "jupyter.widget" });
  const alive = reply?.content.status === "ok" ? reply.content.comms : {};
  if (panel.isDisposed) return;
  const { model } = panel.context;
  // Nobody has changed anything, so nobody is asked to save it.
  const wasDirty = model.dirty;
  for (const { cell, index, id } of keptWidgets(panel)) {
    if (!saved.has(id) || id in alive) continue;
    const output = cell.outputs.get(index).toJSON();
    const { [WIDGET]: _, ...page } = output["data"] as JSONObject;
    cell.outputs.set(index, { ...output, data: page });
  }
  model.dirty = wasDirty;
}
