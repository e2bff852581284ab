// Finds the notebook that a person works in, and puts cells into it.
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import { NotebookActions } from "@jupyterlab/notebook";
import type { Cluster, Overview } from "./overview";

/** The cluster that a notebook's kernel has. */
export function clusterOf(panel: NotebookPanel | null, overview: Overview | null): Cluster | null {
  const kernel = panel?.sessionContext.session?.kernel?.id;
  if (!kernel || !overview) return null;
  return overview.clusters.find((cluster) => cluster.kernel_id === kernel) ?? null;
}

/** Puts code into a new cell below the active one, or into that one where it is empty, and makes it active. */
export function insertCode(panel: NotebookPanel, code: string): void {
  const notebook = panel.content;
  const active = notebook.activeCell;
  if (!active || active.model.type !== "code" || active.model.sharedModel.getSource().trim()) {
    NotebookActions.insertBelow(notebook);
    NotebookActions.changeCellType(notebook, "code");
  }
  notebook.activeCell?.model.sharedModel.setSource(code);
}

export async function insertAndRun(panel: NotebookPanel, code: string): Promise<void> {
  insertCode(panel, code);
  await NotebookActions.run(panel.content, panel.sessionContext);
}

/** Calls back where another notebook becomes current, and where a cell of one has ended. */
export function onNotebookChange(tracker: INotebookTracker, callback: () => void): void {
  tracker.currentChanged.connect(callback);
  NotebookActions.executed.connect(callback);
  tracker.widgetAdded.connect((_, panel) => {
    panel.sessionContext.kernelChanged.connect(callback);
    panel.sessionContext.statusChanged.connect((_, status) => {
      if (["dead", "terminating", "restarting"].includes(status)) callback();
    });
  });
}
