// The head of the panel: which run, what it does, how far it is, and the buttons.

import { element, setAttribute, setText } from "./dom";
import { number } from "./format";
import type { RunStore } from "./store";
import { FINAL_STATES, type RunState, type Status } from "./wire";

type Command = "pause" | "resume" | "stop";

/** After this a button that had no effect can be pressed again. */
const PRESS_PATIENCE_MS = 5000;

export class Header {
  private readonly recipe = element("strong", "nbgpu-recipe");
  private readonly run = element("span", "nbgpu-run");
  private readonly state = element("span", "nbgpu-state");
  private readonly pause = element("button", "nbgpu-button", { type: "button" }, "Pause");
  private readonly stop = element("button", "nbgpu-button nbgpu-stop", { type: "button" }, "Stop");
  private readonly buttons = element(
    "div",
    "nbgpu-buttons",
    { role: "group", "aria-label": "Run" },
    this.pause,
    this.stop,
  );
  private readonly fill = element("div", "nbgpu-bar-fill");
  private readonly bar = element(
    "div",
    "nbgpu-bar nbgpu-progress",
    { role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0" },
    this.fill,
  );
  private readonly words = element("div", "nbgpu-words");
  private readonly refusal = element("div", "nbgpu-refusal", { role: "alert" });
  /** Told to screen readers when the state changes, and only then. */
  private readonly live = element("div", "nbgpu-for-readers", { role: "status", "aria-live": "polite" });
  private toldState: RunState | undefined;
  private pressed: { command: Command; stateThen: RunState; timer: ReturnType<typeof setTimeout> } | undefined;

  readonly root = element(
    "header",
    "nbgpu-header",
    {},
    element("div", "nbgpu-title", {}, this.recipe, this.run, this.state, this.buttons),
    this.bar,
    this.words,
    this.refusal,
    this.live,
  );

  constructor(
    private readonly store: RunStore,
    private readonly send: (command: Command) => void,
  ) {
    this.pause.addEventListener("click", () => this.press(this.pauseCommand()));
    this.stop.addEventListener("click", () => this.press("stop"));
  }

  showButtons(shown: boolean): void {
    this.buttons.hidden = !shown;
  }

  refuse(text: string): void {
    this.release();
    setText(this.refusal, text);
    this.update();
  }

  update(): void {
    const { run, status } = this.store;
    if (!run || !status) return;
    if (this.pressed && this.pressed.stateThen !== status.state) this.release();
    setText(this.recipe, run.recipe);
    setText(this.run, run.id);
    const gone = this.store.kernelIsGone;
    if (gone) this.release();
    setText(this.state, gone ? "kernel gone" : status.state);
    setAttribute(this.state, "data-state", gone ? "gone" : status.state);
    const share = status.total_steps > 0 ? Math.min(1, status.step / status.total_steps) : 0;
    this.fill.style.width = `${(share * 100).toFixed(1)}%`;
    const words = progressInWords(this.store);
    setText(this.words, words);
    setAttribute(this.bar, "aria-valuemax", String(status.total_steps));
    setAttribute(this.bar, "aria-valuenow", String(status.step));
    setAttribute(this.bar, "aria-valuetext", words);
    this.updateButtons(status.state);
    if (gone) {
      setText(this.live, words);
    } else if (this.toldState !== status.state) {
      this.toldState = status.state;
      setText(this.live, `${run.recipe} is ${status.state} at step ${status.step}`);
    }
  }

  private updateButtons(state: RunState): void {
    const over = FINAL_STATES.has(state) || this.store.kernelIsGone;
    const waiting = this.pressed?.command;
    const command = this.pauseCommand();
    const doing = { pause: "Pausing …", resume: "Resuming …", stop: "Stopping …" } as const;
    const idle = command === "pause" ? "Pause" : "Resume";
    setText(this.pause, waiting && waiting !== "stop" ? doing[waiting] : idle);
    setText(this.stop, waiting === "stop" ? doing.stop : "Stop");
    this.pause.disabled = over || waiting !== undefined;
    this.stop.disabled = over || waiting === "stop";
  }

  private pauseCommand(): "pause" | "resume" {
    return this.store.status?.state === "paused" ? "resume" : "pause";
  }

  private press(command: Command): void {
    this.release();
    const stateThen = this.store.status?.state ?? "starting";
    const timer = setTimeout(() => {
      this.release();
      this.update();
    }, PRESS_PATIENCE_MS);
    this.pressed = { command, stateThen, timer };
    setText(this.refusal, "");
    this.send(command);
    this.update();
  }

  private release(): void {
    clearTimeout(this.pressed?.timer);
    this.pressed = undefined;
  }
}

function stepInWords(status: Status): string {
  return status.total_steps > 0 ? `step ${status.step} of ${status.total_steps}` : `step ${status.step}`;
}

export function progressInWords(store: RunStore): string {
  const { run, status } = store;
  if (!run || !status) return "";
  if (store.kernelIsGone) {
    const fate = run.kept
      ? "the run goes on. In the new kernel %nbgpu attach connects to it again, and run.panel() shows it"
      : "the run ended with it";
    return `The kernel is gone; ${fate}. Last heard: ${stepInWords(status)}`;
  }
  if (store.silent_s > 0) {
    return `Nothing was heard from the kernel for ${store.silent_s} s: it is busy, or gone. Last heard: ${stepInWords(status)}`;
  }
  const parts = [stepInWords(status)];
  if (status.num_epochs > 1) parts.push(`epoch ${status.epoch} of ${status.num_epochs}`);
  else if (status.num_epochs === 0 && status.epoch > 0) parts.push(`epoch ${status.epoch}`);
  if (status.samples_per_s > 0) {
    const ranks = status.ranks.filter((rank) => rank.state !== "lost").length;
    parts.push(`${number(Number(status.samples_per_s.toPrecision(3)))} samples/s on ${ranks} rank${ranks > 1 ? "s" : ""}`);
  }
  if (status.eta) parts.push(`${status.eta} left`);
  if (status.time_left) parts.push(status.time_left);
  return parts.join(" · ");
}
