// The sidebar: the host's devices, and one's clusters with their ranks and runs.
import type { Message } from "@lumino/messaging";
import { Widget } from "@lumino/widgets";
import { DeviceCards } from "../../src/device_cards";
import { element, setText } from "../../src/dom";
import { ClusterView } from "./cluster_view";
import type { ClusterActions } from "./cluster_view";
import type { Cluster } from "./overview";
import type { Watch } from "./watch";

const SAID_FOR_MS = 8000;

export interface SidebarActions extends ClusterActions {
  start(): void;
  canStart(): boolean;
}

export class Sidebar extends Widget {
  private readonly problem = element("div", "nbgpu-lab-problem", { role: "alert" });
  private readonly said = element("div", "nbgpu-lab-said", { role: "status" });
  private readonly cards = element("div", "");
  private readonly devices = new DeviceCards(this.cards, "Devices of this host");
  private forgets: ReturnType<typeof setTimeout> | undefined;
  private readonly none = element("p", "nbgpu-lab-muted");
  private readonly start = element(
    "button",
    "nbgpu-lab-button nbgpu-lab-primary",
    { type: "button", title: "Load nbgpu in the current notebook, and start its ranks on all free devices" },
    "Start a cluster here",
  );
  private readonly list = element("div", "nbgpu-lab-clusters");
  private readonly views = new Map<string, ClusterView>();

  constructor(
    private readonly watch: Watch,
    private readonly actions: SidebarActions,
    private readonly current: () => Cluster | null,
  ) {
    super();
    this.addClass("nbgpu-lab-sidebar");
    this.start.addEventListener("click", () => actions.start());
    this.node.append(
      this.problem,
      this.said,
      element("h2", "", {}, "Clusters"),
      this.none,
      this.list,
      this.start,
      element("h2", "", {}, "Devices"),
      this.cards,
    );
    watch.onChange(() => this.render());
    this.render();
  }

  /** Says what has become of something that the person asked for; what went well, for some seconds. */
  say(text: string, isProblem: boolean): void {
    clearTimeout(this.forgets);
    if (text && !isProblem) this.forgets = setTimeout(() => this.say("", false), SAID_FOR_MS);
    setText(this.said, text);
    this.said.hidden = !text;
    this.said.classList.toggle("nbgpu-lab-refused", isProblem);
  }

  render(): void {
    const overview = this.watch.overview;
    const problems = [this.watch.problem, ...(overview?.problems ?? [])].filter(Boolean);
    setText(this.problem, problems.join("\n"));
    this.problem.hidden = problems.length === 0;
    this.said.hidden = !this.said.textContent;
    if (overview?.devices) this.devices.update(overview.devices);
    const current = this.current();
    // That of the notebook in which the person is comes first.
    const clusters = [...(overview?.clusters ?? [])].sort(
      (one, other) => Number(other.id === current?.id) - Number(one.id === current?.id),
    );
    setText(this.none, overview ? "You have no cluster on this host." : "");
    this.none.hidden = clusters.length > 0 || !overview;
    this.start.hidden = !this.actions.canStart();
    for (const [id, view] of this.views) {
      if (clusters.some((cluster) => cluster.id === id)) continue;
      view.root.remove();
      this.views.delete(id);
    }
    clusters.forEach((cluster, at) => {
      let view = this.views.get(cluster.id);
      if (!view) this.views.set(cluster.id, (view = new ClusterView(this.actions)));
      // Moving an element takes the focus from it.
      if (this.list.children[at] !== view.root) this.list.insertBefore(view.root, this.list.children[at] ?? null);
      view.show(cluster, cluster.id === current?.id, overview!.time_s);
    });
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.watch.setSeen(true);
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.watch.setSeen(false);
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    if (this.isVisible) this.watch.setSeen(true);
  }
}
