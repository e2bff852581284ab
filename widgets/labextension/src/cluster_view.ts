// One cluster in the sidebar: its notebook, its ranks, its run, and what can be done with it.
import { element, setAttribute, setText } from "../../src/dom";
import type { Cluster, Rank } from "./overview";
import { rankColor } from "./palette";
import { clusterStateInWords, countOfRanks, duration, progressInWords } from "./wording";

/** What the buttons do. */
export interface ClusterActions {
  openNotebook(cluster: Cluster): void;
  attach(cluster: Cluster): void;
  command(cluster: Cluster, command: "pause" | "resume" | "stop"): void;
  openReport(cluster: Cluster): void;
  end(cluster: Cluster): void;
}

function button(className: string): HTMLButtonElement {
  return element("button", `nbgpu-lab-button ${className}`, { type: "button" });
}

class RankRow {
  private readonly dot = element("span", "nbgpu-lab-dot", { "aria-hidden": "true" });
  private readonly name = element("span", "nbgpu-lab-rank-name");
  private readonly device = element("span", "nbgpu-lab-muted");
  private readonly words = element("span", "nbgpu-lab-rank-words");
  readonly root = element("li", "nbgpu-lab-rank", {}, this.dot, this.name, this.device, this.words);

  show(rank: Rank): void {
    this.dot.style.background = rankColor(rank.rank);
    setText(this.name, `rank ${rank.rank}`);
    setText(this.device, rank.device);
    setText(this.words, rank.words);
    setAttribute(this.root, "data-sign", rank.sign);
  }
}

export class ClusterView {
  private readonly notebook = button("nbgpu-lab-link nbgpu-lab-notebook");
  private readonly state = element("div", "nbgpu-lab-muted");
  private readonly ranks = element("ul", "nbgpu-lab-ranks");
  private readonly rankRows: RankRow[] = [];
  private readonly waiting = element("div", "nbgpu-lab-warning");
  private readonly runName = element("div", "nbgpu-lab-run-name");
  private readonly bar = element("progress", "nbgpu-lab-progress", { "aria-label": "Progress of the run" });
  private readonly progress = element("div", "nbgpu-lab-muted");
  private readonly run = element("div", "nbgpu-lab-run", {}, this.runName, this.bar, this.progress);
  private readonly pause = button("");
  private readonly stop = button("nbgpu-lab-danger");
  private readonly report = button("");
  private readonly attach = button("nbgpu-lab-primary");
  private readonly end = button("nbgpu-lab-danger");
  private readonly buttons = element(
    "div",
    "nbgpu-lab-buttons",
    {},
    this.attach,
    this.pause,
    this.stop,
    this.report,
    this.end,
  );
  readonly root = element(
    "section",
    "nbgpu-lab-cluster",
    {},
    this.notebook,
    this.state,
    this.ranks,
    this.waiting,
    this.run,
    this.buttons,
  );
  private cluster!: Cluster;

  constructor(actions: ClusterActions) {
    this.notebook.addEventListener("click", () => actions.openNotebook(this.cluster));
    this.attach.addEventListener("click", () => actions.attach(this.cluster));
    this.pause.addEventListener("click", () =>
      actions.command(this.cluster, this.cluster.run?.state === "paused" ? "resume" : "pause"),
    );
    this.stop.addEventListener("click", () => actions.command(this.cluster, "stop"));
    this.report.addEventListener("click", () => actions.openReport(this.cluster));
    this.end.addEventListener("click", () => actions.end(this.cluster));
    setText(this.stop, "Stop");
    setText(this.report, "Report");
    setText(this.attach, "Attach");
  }

  /** @param isCurrent whether the cluster is that of the notebook in which the person is. */
  show(cluster: Cluster, isCurrent: boolean, now_s: number): void {
    this.cluster = cluster;
    this.root.classList.toggle("nbgpu-lab-current", isCurrent);
    setAttribute(this.root, "aria-label", `Cluster ${cluster.id} of ${cluster.notebook}`);
    setText(this.notebook, isCurrent ? `${cluster.notebook} (this notebook)` : cluster.notebook);
    this.notebook.disabled = !cluster.contents_path;
    const age = duration(now_s - cluster.started_s);
    const ranks = countOfRanks(cluster.ranks.length);
    setText(this.state, `${ranks}, ${clusterStateInWords(cluster)}, ${age}, id ${cluster.id}`);
    this.showRanks(cluster.ranks);
    const gone = cluster.gone && cluster.run && !cluster.run.is_over ? `${cluster.gone} gone.` : "";
    this.showWarning([cluster.waiting && `${capital(cluster.waiting)}.`, capital(gone)]);
    this.showRun();
    this.showButtons();
  }

  private showRanks(ranks: Rank[]): void {
    while (this.rankRows.length > ranks.length) this.rankRows.pop()!.root.remove();
    ranks.forEach((rank, at) => {
      if (!this.rankRows[at]) {
        this.rankRows[at] = new RankRow();
        this.ranks.append(this.rankRows[at].root);
      }
      this.rankRows[at].show(rank);
    });
  }

  private showWarning(sentences: string[]): void {
    const text = sentences.filter(Boolean).join(" ");
    setText(this.waiting, text);
    this.waiting.hidden = !text;
  }

  private showRun(): void {
    const run = this.cluster.run;
    this.run.hidden = !run;
    if (!run) return;
    setText(this.runName, `${run.title || run.name}: ${run.state}`);
    this.runName.title = run.name;
    const progress = run.progress;
    this.bar.hidden = !progress || run.is_over;
    if (progress) {
      this.bar.max = Math.max(1, progress.total_steps);
      this.bar.value = progress.step;
    }
    setText(this.progress, progress ? progressInWords(progress) : "");
  }

  private showButtons(): void {
    const { state, run } = this.cluster;
    const goesOn = Boolean(run && !run.is_over);
    this.attach.hidden = state !== "kept";
    setAttribute(this.attach, "title", "Go on with this cluster in the current notebook");
    this.pause.hidden = this.stop.hidden = !goesOn;
    setText(this.pause, run?.state === "paused" ? "Resume" : "Pause");
    this.stop.disabled = this.pause.disabled = run?.state === "stopping";
    setAttribute(this.stop, "title", "End the run after its step, with a checkpoint");
    this.report.hidden = !run?.has_report;
    this.end.hidden = state === "starting";
    setText(this.end, state === "left over" ? "Free" : "End …");
    setAttribute(this.end, "title", "End the ranks of this cluster, and free their devices");
  }
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
