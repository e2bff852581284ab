// Draws the devices of a host as cards: memory, load, heat, and who has each. The kernel's picker and JupyterLab's
// sidebar show the same cards, made of what nbgpu/client/host/device_cards.py writes as JSON.
//
// Cards are changed in place, so that nothing flickers and the keyboard stays where it is. No number stands in a live
// region or in a control's description, because a screen reader would read it out each second.

import { element, setAttribute, setText } from "./dom";

export interface DeviceCard {
  kind: "gpu" | "cpu";
  /** Empty for the CPU. */
  uuid: string;
  title: string;
  name: string;
  /** The split GPU above a part of it (MIG); empty for a whole device. */
  group: string;
  used_bytes: number | null;
  total_bytes: number;
  utilization_percent: number | null;
  temperature_c: number | null;
  power_w: number | null;
  power_limit_w: number | null;
  neighbours: string;
  state: "free" | "this notebook" | "yours" | "others" | "unreadable";
  holder: string;
  why: string;
  is_choosable: boolean;
  /** '9.1 of 79.6 GiB' */
  memory: string;
  /** '37 % busy' */
  load: string;
  /** '41 °C, 180 of 700 W', without what is not known */
  heat: string;
}

/** What `HostDevices.as_json` gives. */
export interface Devices {
  devices: DeviceCard[];
  note: string;
  /** The UUIDs of the GPUs that are offered before a person has chosen any. */
  proposed: string[];
}

/** What is chosen, where cards can be chosen. */
export interface Choice {
  /** UUIDs; where there are none, the CPU's card is marked. */
  chosen: readonly string[];
  /** Nothing can be changed now. */
  isLocked: boolean;
}

/** With more GPUs than this the cards take two lines each, so that all of a machine's eight are in sight. */
const MOST_WHOLE_CARDS = 4;

/** How many pages' parts have had ids: each of them may have loaded this script for itself. */
const COUNT = Symbol.for("nbgpu.cards");

function newId(): string {
  const page = globalThis as unknown as Record<symbol, number | undefined>;
  page[COUNT] = (page[COUNT] ?? 0) + 1;
  return `nbgpu-card-${page[COUNT]}`;
}

/**
 * The cards in `root`.
 *
 * With `onChoice` each GPU has a check box, and `onChoice` hears of each change by the person; what is chosen is what
 * `update` is given next.
 */
export class DeviceCards {
  private readonly caption = element("p", "nbgpu-cards-caption");
  private readonly places = element("div", "nbgpu-cards-grid");
  private readonly note = element("p", "nbgpu-cards-note");
  private readonly cards = new Map<string, Card>();
  private readonly splits = new Map<string, Split>();
  private readonly root: HTMLElement;

  constructor(
    root: HTMLElement,
    label: string,
    private readonly onChoice?: (uuid: string, isChosen: boolean) => void,
  ) {
    this.root = root;
    root.classList.add("nbgpu-cards");
    setAttribute(root, "role", "group");
    setAttribute(root, "aria-label", label);
    root.replaceChildren(this.caption, this.places, this.note);
  }

  update({ devices, note }: Pick<Devices, "devices" | "note">, choice: Choice = { chosen: [], isLocked: true }): void {
    const cards = new Map<string, Card>();
    const splits = new Map<string, Split>();
    const gpus = devices.filter((device) => device.kind === "gpu");
    const isCompact = gpus.length > MOST_WHOLE_CARDS;
    this.root.classList.toggle("nbgpu-cards-compact", isCompact);
    // What all of many cards would say is said once, above them.
    const common = (["name", "neighbours"] as const).flatMap((property) => {
      const isCommon = isCompact && new Set(gpus.map((gpu) => gpu[property])).size === 1;
      this.root.classList.toggle(`nbgpu-cards-one-${property}`, isCommon);
      return isCommon ? [gpus[0]![property]] : [];
    });
    setText(this.caption, common.length ? `${gpus.length} GPUs: ${common.filter(Boolean).join(", ")}` : "");
    const inGrid: HTMLElement[] = [];
    const inSplit = new Map<Split, HTMLElement[]>();
    for (const device of devices) {
      const key = `${device.kind} ${device.uuid || device.title}`;
      const card = this.cards.get(key) ?? new Card(device.kind === "gpu" ? this.onChoice : undefined);
      cards.set(key, card);
      card.update(device, choice, this.onChoice !== undefined);
      if (!device.group) {
        inGrid.push(card.root);
        continue;
      }
      const split = splits.get(device.group) ?? this.splits.get(device.group) ?? new Split(device.group);
      if (!splits.has(device.group)) {
        splits.set(device.group, split);
        inGrid.push(split.root);
        split.update(device);
      }
      inSplit.set(split, [...(inSplit.get(split) ?? []), card.root]);
    }
    for (const [split, roots] of inSplit) place(split.parts, roots);
    place(this.places, inGrid);
    setText(this.note, note);
    this.note.hidden = note === "";
    replace(this.cards, cards);
    replace(this.splits, splits);
  }
}

function replace<Value>(map: Map<string, Value>, by: Map<string, Value>): void {
  map.clear();
  for (const [key, value] of by) map.set(key, value);
}

/** Makes `children` the children of `parent`. What stands in its place already is not moved, because that would take
 * the keyboard away from it. */
function place(parent: HTMLElement, children: readonly HTMLElement[]): void {
  const wanted = new Set<Element>(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
}

/** A GPU that is split, with its parts in it. */
class Split {
  readonly parts = element("div", "nbgpu-cards-grid");
  readonly root: HTMLElement;
  private readonly heat = element("span", "nbgpu-card-heat");

  constructor(name: string) {
    const id = newId();
    const title = element("span", "nbgpu-card-title", { id }, `${name}, split into parts (MIG)`);
    const head = element("div", "nbgpu-split-head", {}, title, this.heat);
    this.root = element("div", "nbgpu-split", { role: "group", "aria-labelledby": id }, head, this.parts);
  }

  update(part: DeviceCard): void {
    setText(this.heat, part.heat);
  }
}

/** A bar with its name before it and its number in words after it. */
class Measure {
  readonly root: HTMLElement;
  private readonly fill = element("span", "nbgpu-card-fill");
  private readonly words = element("span", "nbgpu-card-words");

  constructor(name: string) {
    const bar = element("span", "nbgpu-card-bar", { "aria-hidden": "true" }, this.fill);
    this.root = element("div", "nbgpu-card-measure", {}, element("span", "", {}, name), bar, this.words);
  }

  update(share: number | null, words: string): void {
    const percent = Math.min(Math.max(share ?? 0, 0), 1) * 100;
    this.fill.style.width = `${percent.toFixed(1)}%`;
    setText(this.words, words);
    this.root.classList.toggle("nbgpu-unknown", share === null);
  }
}

class Card {
  readonly root: HTMLElement;
  private readonly title: HTMLElement;
  private readonly name = element("div", "nbgpu-card-name");
  private readonly holder = element("span", "nbgpu-card-holder");
  private readonly memory = new Measure("memory");
  private readonly load = new Measure("load");
  private readonly heat = element("span", "");
  private readonly neighbours = element("span", "nbgpu-card-neighbours");
  private readonly facts = element("div", "nbgpu-card-facts", {}, this.heat, this.neighbours);
  private readonly why = element("p", "nbgpu-card-why");
  private readonly box: HTMLInputElement | undefined;
  private uuid = "";

  constructor(onChoice?: (uuid: string, isChosen: boolean) => void) {
    const id = newId();
    this.name.id = `${id}-name`;
    this.holder.id = `${id}-holder`;
    this.why.id = `${id}-why`;
    if (onChoice) {
      const box = element("input", "", {
        type: "checkbox",
        id,
        "aria-labelledby": `${id}-title ${id}-name`,
        "aria-describedby": `${id}-holder ${id}-why`,
      });
      // A box that is disabled could not be reached by the keyboard, nor could the reason why it is.
      box.addEventListener("click", (event) => {
        if (box.getAttribute("aria-disabled") === "true") event.preventDefault();
      });
      box.addEventListener("change", () => onChoice(this.uuid, box.checked));
      this.box = box;
      this.title = element("label", "nbgpu-card-title", { for: id, id: `${id}-title` });
    } else {
      this.title = element("span", "nbgpu-card-title", { id: `${id}-title` });
    }
    const head = element("div", "nbgpu-card-head", {}, ...(this.box ? [this.box] : []), this.title, this.holder);
    this.root = element(
      "div",
      "nbgpu-card",
      { role: "group", "aria-labelledby": `${id}-title` },
      head,
      this.name,
      this.memory.root,
      this.load.root,
      this.facts,
      this.why,
    );
  }

  update(device: DeviceCard, choice: Choice, isPicker: boolean): void {
    this.uuid = device.uuid;
    setAttribute(this.root, "data-state", device.state);
    setAttribute(this.root, "data-kind", device.kind);
    setText(this.title, device.title);
    // The name of a part is that of the whole GPU, above it, and its title.
    setText(this.name, device.group ? "" : device.name);
    setText(this.holder, device.holder);
    const { used_bytes, total_bytes, utilization_percent } = device;
    this.memory.update(used_bytes === null || !total_bytes ? null : used_bytes / total_bytes, device.memory);
    this.load.update(utilization_percent === null ? null : utilization_percent / 100, device.load);
    // So is the heat.
    setText(this.heat, device.group ? "" : device.heat);
    setText(this.neighbours, device.neighbours);
    setText(this.why, device.why);
    const isChosen = device.kind === "gpu" ? choice.chosen.includes(device.uuid) : choice.chosen.length === 0;
    this.root.classList.toggle("nbgpu-chosen", isPicker && isChosen);
    if (!this.box) return;
    if (this.box.checked !== isChosen) this.box.checked = isChosen;
    setAttribute(this.box, "aria-disabled", String(choice.isLocked || !device.is_choosable));
  }
}
