// The row of rank chips: colour, device, state, step, memory, and a warning in words.

import { element, setAttribute, setText } from "./dom";
import { memory } from "./format";
import type { RunStore } from "./store";

/** Above this many ranks the chips are small. */
const MANY_RANKS = 8;

interface Chip {
  root: HTMLElement;
  device: HTMLElement;
  state: HTMLElement;
  step: HTMLElement;
  fill: HTMLElement;
  memory: HTMLElement;
  warning: HTMLElement;
}

export class Chips {
  readonly root = element("div", "nbgpu-chips", { role: "list", "aria-label": "Ranks" });
  private chips: Chip[] = [];

  update(store: RunStore): void {
    if (this.chips.length !== store.ranks.length) {
      this.chips = store.ranks.map((_, rank) => makeChip(rank));
      this.root.replaceChildren(...this.chips.map((chip) => chip.root));
      const many = store.ranks.length > MANY_RANKS;
      this.root.classList.toggle("nbgpu-many", many);
      // What scrolls must be in reach of the keyboard.
      if (many) this.root.tabIndex = 0;
    }
    this.chips.forEach((chip, rank) => {
      const fixed = store.ranks[rank];
      const now = store.status?.ranks[rank];
      if (!now) return;
      const held = now.memory_bytes ?? 0;
      const share = fixed.memory_bytes > 0 ? Math.min(held / fixed.memory_bytes, 1) : 0;
      const used = memory(now.memory_bytes, fixed.memory_bytes);
      chip.root.style.setProperty("--nbgpu-rank", fixed.color);
      setText(chip.device, fixed.label);
      chip.device.title = fixed.label;
      const state = store.kernelIsGone ? "not known" : now.state;
      setText(chip.state, state);
      const step = now.step === null ? "" : `step ${now.step}`;
      setText(chip.step, step);
      chip.fill.style.width = `${(share * 100).toFixed(1)}%`;
      setText(chip.memory, used);
      const warning = store.kernelIsGone ? "" : now.warning;
      setText(chip.warning, warning ? `⚠ ${warning}` : "");
      chip.root.classList.toggle("nbgpu-warned", warning !== "");
      const words = [`rank ${rank}`, fixed.label, state, step, `memory ${used}`, warning];
      setAttribute(chip.root, "aria-label", words.filter(Boolean).join(", "));
    });
  }
}

function makeChip(rank: number): Chip {
  const device = element("span", "nbgpu-chip-device");
  const state = element("span", "nbgpu-chip-state");
  const step = element("span", "nbgpu-chip-step");
  const fill = element("span", "nbgpu-bar-fill");
  const memory = element("span", "nbgpu-chip-memory");
  const warning = element("span", "nbgpu-chip-warning");
  // The chip's label says all of this in one sentence; its parts would only repeat it.
  const inside = element(
    "div",
    "nbgpu-chip-inside",
    { "aria-hidden": "true" },
    element("div", "nbgpu-chip-row", {}, element("span", "nbgpu-chip-name", {}, `rank ${rank}`), state),
    element("div", "nbgpu-chip-row", {}, device, step),
    element("div", "nbgpu-bar", {}, fill),
    element("div", "nbgpu-chip-row", {}, memory, warning),
  );
  const root = element("div", "nbgpu-chip", { role: "listitem" }, inside);
  return { root, device, state, step, fill, memory, warning };
}
