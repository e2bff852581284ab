// The status bar's line about the current notebook's ranks; a click opens the sidebar.
import { Widget } from "@lumino/widgets";
import { element, setText } from "../../src/dom";
import type { Cluster } from "./overview";
import { statusInWords } from "./wording";

export class StatusItem extends Widget {
  private readonly button = element("button", "nbgpu-lab-status", { type: "button", title: "Open nbgpu's sidebar" });

  constructor(open: () => void) {
    super();
    this.addClass("nbgpu-lab-status-item");
    this.button.addEventListener("click", open);
    this.node.append(this.button);
    this.showCluster(null);
  }

  /** Shows a notebook's cluster; without one there is nothing to see. */
  showCluster(cluster: Cluster | null): void {
    setText(this.button, cluster ? statusInWords(cluster) : "");
    this.button.classList.toggle("nbgpu-lab-warns", Boolean(cluster?.waiting || cluster?.gone));
    this.setHidden(cluster === null);
  }
}
