// nbgpu in JupyterLab and Notebook 7. Every part is optional: a notebook works the same without it.
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { ICommandPalette } from "@jupyterlab/apputils";
import { EditorExtensionRegistry, IEditorExtensionRegistry } from "@jupyterlab/codemirror";
import { INotebookTracker } from "@jupyterlab/notebook";
import { IStatusBar } from "@jupyterlab/statusbar";
import { cellMark } from "./cell_mark";
import { Actions, addCommands, CATEGORY, INSERT, SHOW, START } from "./commands";
import { Host } from "./host";
import { icon } from "./icon";
import { clusterOf, followNotebooks } from "./notebooks";
import { edgeOf } from "./palette";
import { Sidebar } from "./sidebar";
import { StatusItem } from "./status_item";
import { Watch } from "./watch";

const sidebar: JupyterFrontEndPlugin<void> = {
  id: "nbgpu:sidebar",
  description: "Devices, clusters and runs of this host, commands for them, and a line in the status bar.",
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    statusBar: IStatusBar | null,
  ) => {
    const host = new Host(app.serviceManager.serverSettings);
    const watch = new Watch((withDevices) => host.overview(withDevices));
    const actions = new Actions(app, tracker, host, watch);
    const current = () => clusterOf(tracker.currentWidget, watch.overview);
    const panel = new Sidebar(watch, actions, current);
    panel.id = "nbgpu-sidebar";
    panel.title.icon = icon;
    panel.title.caption = "nbgpu: devices and clusters";
    app.shell.add(panel, "left", { rank: 650 });
    actions.say = (text, isProblem) => panel.say(text, isProblem);
    const show = () => app.shell.activateById(panel.id);
    addCommands(app, tracker, actions, show);
    for (const command of [START, INSERT, SHOW]) palette?.addItem({ command, category: CATEGORY });

    const item = new StatusItem(show);
    statusBar?.registerStatusItem("nbgpu:status", { item, align: "left", rank: 80 });
    const render = () => {
      const cluster = current();
      item.showCluster(cluster);
      panel.render();
      app.commands.notifyCommandChanged(START);
      // The cells' edges have the colours of as many ranks as there are.
      const ranks = cluster?.ranks.map((rank) => rank.rank) ?? [];
      const edge = ranks.length ? edgeOf(ranks) : "";
      tracker.currentWidget?.node.style.setProperty("--nbgpu-all-ranks", edge);
    };
    watch.onChange(render);
    const onChange = () => {
      render();
      // A page where nobody looks and nobody has a cluster does not ask.
      if (watch.period() !== null) watch.nudge();
    };
    followNotebooks(tracker, onChange, () => watch.hint());
    document.addEventListener("visibilitychange", () => watch.setPageVisible(!document.hidden));
  },
};

const cells: JupyterFrontEndPlugin<void> = {
  id: "nbgpu:cells",
  description: "Marks the cells that go to the ranks.",
  autoStart: true,
  requires: [IEditorExtensionRegistry],
  activate: (_: JupyterFrontEnd, extensions: IEditorExtensionRegistry) => {
    extensions.addExtension({
      name: "nbgpu:distributed-cell",
      factory: () => EditorExtensionRegistry.createImmutableExtension(cellMark()),
    });
  },
};

export default [sidebar, cells];
