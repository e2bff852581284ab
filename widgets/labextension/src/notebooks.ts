// Finds the notebook that a person works in, and puts cells into it.
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import { NotebookActions } from "@jupyterlab/notebook";
import { showKeptPages } from "./kept_pages";
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

/** Whether a notebook has to do with nbgpu, as far as its cells tell. */
function mentionsNbgpu(panel: NotebookPanel): boolean {
  return panel.content.widgets.some((cell) => cell.model.sharedModel.getSource().includes("nbgpu"));
}

/**
 * Follows the notebooks of a page.
 *
 * @param onChange a cell has ended, or another notebook or kernel is there.
 * @param onHint a notebook that mentions nbgpu was opened, or its kernel has done something, such as what a button of
 * a widget asked for.
 */
export function followNotebooks(tracker: INotebookTracker, onChange: () => void, onHint: () => void): void {
  const hint = (panel: NotebookPanel | null) => {
    if (panel && !panel.isDisposed && mentionsNbgpu(panel)) onHint();
  };
  const follow = (panel: NotebookPanel) => {
    void panel.context.ready.then(() => hint(panel));
    // A kernel that ends meanwhile does not answer, and JupyterLab says so.
    showKeptPages(panel).catch((error: unknown) => console.warn("nbgpu: the kernel has not named its widgets", error));
    panel.sessionContext.kernelChanged.connect(onChange);
    panel.sessionContext.statusChanged.connect((_, status) => {
      if (["dead", "terminating", "restarting"].includes(status)) onChange();
      else if (status === "idle") hint(panel);
    });
  };
  tracker.widgetAdded.connect((_, panel) => follow(panel));
  tracker.forEach(follow);
  tracker.currentChanged.connect((_, panel) => {
    onChange();
    hint(panel);
  });
  NotebookActions.executed.connect(() => onChange());
}
