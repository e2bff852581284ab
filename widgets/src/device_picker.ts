// The devices of the control panel: cards with check boxes, two buttons, and a line that says what is chosen. It asks
// the kernel for a reading each second while it is in sight, and for nothing otherwise.

import { type DeviceCard, DeviceCards, type Devices } from "./device_cards";
import { element, setText } from "./dom";
import { watchKernel } from "./kernel";

/** The part of anywidget's model that is used here. */
export interface PickerModel {
  widget_manager?: unknown;
  get(name: "devices"): Devices | Record<string, never>;
  get(name: "wanted"): string[] | null;
  get(name: "problem"): string;
  get(name: "disabled"): boolean;
  set(name: "wanted", value: string[]): void;
  save_changes(): void;
  send(content: { type: "read" | "rest" }): void;
  on(event: string, callback: () => void): void;
  off(event: string, callback: () => void): void;
}

const PERIOD_MS = 1000;
/** After this time without an answer the cards say how old they are, and the kernel is asked again. */
const LATE_MS = 5000;

/** The GPUs that are chosen: by the person, or else those that are offered. `device_picker.py` has the same rule. */
export function chosenOf({ devices, proposed }: Devices, wanted: readonly string[] | null): string[] {
  if (wanted === null) return [...proposed];
  return devices.filter((card) => card.uuid && card.is_choosable && wanted.includes(card.uuid)).map((card) => card.uuid);
}

function summary(gpus: readonly DeviceCard[], numChosen: number): string {
  if (gpus.length === 0) return "There is no NVIDIA GPU here: the ranks run on the CPU.";
  if (numChosen > 0) return `${numChosen} of ${gpus.length} GPUs chosen.`;
  const isAnyFree = gpus.some((card) => card.state === "free");
  return `No GPU is ${isAnyFree ? "chosen" : "free"}: the ranks run on the CPU.`;
}

export class Picker {
  private readonly cards: DeviceCards;
  private readonly allFree = element("button", "nbgpu-cards-button", { type: "button" }, "all free ones");
  private readonly none = element("button", "nbgpu-cards-button", { type: "button" }, "none (CPU)");
  // It changes with the choice alone, so that a screen reader hears of that and not of each second.
  private readonly summary = element("span", "nbgpu-cards-summary", { role: "status" });
  private readonly buttons = element("div", "nbgpu-cards-buttons", {}, this.allFree, this.none, this.summary);
  private readonly problem = element("p", "nbgpu-cards-problem", { role: "status" });
  private readonly closers: (() => void)[] = [];
  private devices: Devices = { devices: [], note: "", proposed: [] };
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isInSight = false;
  private isShown = false;
  private isGone = false;
  private isLate = false;
  private readAt: Date | undefined;

  constructor(
    private readonly model: PickerModel,
    root: HTMLElement,
  ) {
    const place = element("div", "");
    root.classList.add("nbgpu-picker");
    root.replaceChildren(place, this.buttons, this.problem);
    this.cards = new DeviceCards(place, "Devices", (uuid, isChosen) => this.choose(uuid, isChosen));
    this.allFree.addEventListener("click", () =>
      this.want(this.devices.devices.filter((card) => card.uuid && card.state === "free").map((card) => card.uuid)),
    );
    this.none.addEventListener("click", () => this.want([]));
    const draw = (): void => this.draw();
    const take = (): void => this.take();
    for (const name of ["wanted", "disabled", "problem"]) this.hear(`change:${name}`, draw);
    this.hear("change:num_readings", take);
    this.closers.push(watchKernel(model, () => this.leave()));
    this.watchSight(root);
    this.take();
  }

  close(): void {
    for (const close of this.closers) close();
    this.show(false);
  }

  private hear(event: string, callback: () => void): void {
    this.model.on(event, callback);
    this.closers.push(() => this.model.off(event, callback));
  }

  /** Follows whether the cards can be seen: not scrolled away, not in a tab behind another, not in a hidden page. */
  private watchSight(root: HTMLElement): void {
    const judge = (): void => this.show(this.isInSight && document.visibilityState === "visible");
    const observer = new IntersectionObserver((entries) => {
      this.isInSight = entries.at(-1)!.isIntersecting;
      judge();
    });
    observer.observe(root);
    document.addEventListener("visibilitychange", judge);
    this.closers.push(() => observer.disconnect(), () => document.removeEventListener("visibilitychange", judge));
  }

  private show(isShown: boolean): void {
    if (isShown === this.isShown) return;
    this.isShown = isShown;
    clearTimeout(this.timer);
    if (this.isGone) return;
    if (isShown) this.ask();
    else this.model.send({ type: "rest" });
  }

  private ask(): void {
    this.model.send({ type: "read" });
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.isLate = true;
      this.draw();
      this.ask();
    }, LATE_MS);
  }

  /** Takes a reading, and asks for the next one in a second. */
  private take(): void {
    const devices = this.model.get("devices");
    if ("devices" in devices) {
      this.devices = devices as Devices;
      this.readAt = new Date();
    }
    this.isLate = false;
    clearTimeout(this.timer);
    if (this.isShown && !this.isGone) this.timer = setTimeout(() => this.ask(), PERIOD_MS);
    this.draw();
  }

  private leave(): void {
    this.isGone = true;
    clearTimeout(this.timer);
    this.draw();
  }

  private choose(uuid: string, isChosen: boolean): void {
    const chosen = chosenOf(this.devices, this.model.get("wanted"));
    this.want(isChosen ? [...chosen, uuid] : chosen.filter((other) => other !== uuid));
  }

  private want(uuids: string[]): void {
    if (this.isLocked()) return;
    this.model.set("wanted", uuids);
    this.model.save_changes();
    this.draw();
  }

  private isLocked(): boolean {
    return this.isGone || this.model.get("disabled");
  }

  private draw(): void {
    const { devices } = this.devices;
    const gpus = devices.filter((card) => card.kind === "gpu");
    const held = devices.filter((card) => card.state === "this notebook");
    const isLocked = this.isLocked();
    // While a cluster is in use the cards show what that has.
    const inUse = isLocked && held.length > 0;
    const chosen = inUse ? held.flatMap((card) => card.uuid || []) : chosenOf(this.devices, this.model.get("wanted"));
    this.cards.update(this.devices, { chosen, isLocked });
    for (const button of [this.allFree, this.none]) {
      button.hidden = gpus.length === 0;
      button.disabled = isLocked;
    }
    setText(this.summary, devices.length === 0 || inUse ? "" : summary(gpus, chosen.length));
    setText(this.problem, this.problemInWords());
  }

  private problemInWords(): string {
    const time = this.readAt?.toLocaleTimeString() ?? "";
    if (this.isGone) return time && `The kernel is gone; the numbers are those of ${time}.`;
    const problem = this.model.get("problem");
    if (problem) return problem;
    if (!this.readAt) return "The devices are being read …";
    return this.isLate ? `The kernel is busy; the numbers are those of ${time}.` : "";
  }
}

function render({ model, el }: { model: PickerModel; el: HTMLElement }): () => void {
  const picker = new Picker(model, el);
  return () => picker.close();
}

export default { render };
