// The commands of the palette, and what the sidebar's buttons do.
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { Dialog, showDialog } from "@jupyterlab/apputils";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import type { Host } from "./host";
import { clusterOf, insertAndRun, insertCode } from "./notebooks";
import type { Cluster } from "./overview";
import type { SidebarActions } from "./sidebar";
import type { Watch } from "./watch";

export const CATEGORY = "nbgpu";
export const START = "nbgpu:start-cluster";
export const INSERT = "nbgpu:insert-distributed-cell";
export const SHOW = "nbgpu:show-sidebar";

const START_CODE = "%load_ext nbgpu\n%nbgpu start";
const attachCode = (cluster: Cluster) => `%load_ext nbgpu\n%nbgpu attach ${cluster.id}`;

export class Actions implements SidebarActions {
  /** Says in the sidebar what has become of a request. */
  say: (text: string, isProblem: boolean) => void = () => {};

  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly tracker: INotebookTracker,
    private readonly host: Host,
    private readonly watch: Watch,
  ) {}

  canStart(): boolean {
    const panel = this.tracker.currentWidget;
    return panel !== null && clusterOf(panel, this.watch.overview) === null;
  }

  start(): void {
    const panel = this.tracker.currentWidget;
    if (panel) void this.carryOut("", insertAndRun(panel, START_CODE));
  }

  insertCell(): void {
    const panel = this.tracker.currentWidget;
    if (!panel) return;
    const line = "%%distributed\n";
    insertCode(panel, line);
    const cell = panel.content.activeCell;
    const focus = () => {
      this.app.shell.activateById(panel.id);
      panel.content.mode = "edit";
      cell?.editor?.setCursorPosition({ line: 1, column: 0 });
      cell?.editor?.focus();
    };
    // A new cell gets its editor once it is in sight, and the palette takes the focus along as it closes.
    void cell?.ready.then(() => requestAnimationFrame(focus));
  }

  openNotebook(cluster: Cluster): void {
    void this.carryOut("", this.open(cluster));
  }

  /** A kept cluster goes on where the person works; with no notebook open, in its own. */
  attach(cluster: Cluster): void {
    const attach = async () => {
      const panel = this.tracker.currentWidget ?? (await this.open(cluster));
      if (!panel) throw new Error("Open the notebook first in which the cluster is to go on.");
      await panel.context.ready;
      await panel.sessionContext.ready;
      this.app.shell.activateById(panel.id);
      await insertAndRun(panel, attachCode(cluster));
    };
    void this.carryOut("", attach());
  }

  command(cluster: Cluster, command: "pause" | "resume" | "stop"): void {
    const title = cluster.run?.title || cluster.run?.name || "The run";
    const will = {
      pause: `${title} waits before its next step.`,
      resume: `${title} goes on.`,
      stop: `${title} ends after its step, with a checkpoint.`,
    };
    void this.carryOut(will[command], this.host.commandRun(cluster, command));
  }

  openReport(cluster: Cluster): void {
    window.open(this.host.reportUrl(cluster), "_blank", "noopener");
  }

  end(cluster: Cluster): void {
    const end = async () => {
      if (cluster.state !== "left over" && !(await this.isSure(cluster))) return;
      await this.host.end(cluster);
    };
    void this.carryOut("", end());
  }

  private async isSure(cluster: Cluster): Promise<boolean> {
    const runs = cluster.run && !cluster.run.is_over ? " Its run is cut off without a checkpoint." : "";
    const answer = await showDialog({
      title: `End the cluster of ${cluster.notebook}?`,
      body: `What its ranks hold is lost, and their devices are free.${runs}`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: "End it" })],
    });
    return answer.button.accept;
  }

  private async open(cluster: Cluster): Promise<NotebookPanel | null> {
    if (!cluster.contents_path) return null;
    const opened: unknown = await this.app.commands.execute("docmanager:open", { path: cluster.contents_path });
    return (opened as NotebookPanel | undefined) ?? null;
  }

  private async carryOut(sentence: string, work: Promise<unknown>): Promise<void> {
    try {
      await work;
      this.say(sentence, false);
    } catch (error) {
      this.say(error instanceof Error ? error.message : String(error), true);
    }
    this.watch.nudge();
  }
}

export function addCommands(
  app: JupyterFrontEnd,
  tracker: INotebookTracker,
  actions: Actions,
  showSidebar: () => void,
): void {
  const hasNotebook = () => tracker.currentWidget !== null;
  app.commands.addCommand(START, {
    label: "Start a Cluster in This Notebook",
    caption: "Load nbgpu, and start a rank on each free GPU, or two on the CPU",
    isEnabled: () => actions.canStart(),
    execute: () => actions.start(),
  });
  app.commands.addCommand(INSERT, {
    label: "Insert a Distributed Cell",
    caption: "Insert a cell below that runs on every rank",
    isEnabled: hasNotebook,
    execute: () => actions.insertCell(),
  });
  app.commands.addCommand(SHOW, {
    label: "Show Devices and Clusters",
    caption: "Open nbgpu's sidebar",
    execute: showSidebar,
  });
  tracker.currentChanged.connect(() => {
    app.commands.notifyCommandChanged(START);
    app.commands.notifyCommandChanged(INSERT);
  });
}
