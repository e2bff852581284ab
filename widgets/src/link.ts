// One panel's line to the kernel. It lives as long as the widget does, whether or not a view is on the page, so that
// no message is lost before the first view is drawn.

import { disableWidgets, watchKernel } from "./kernel";
import { findPlace, hasNotebook, saveNotebook } from "./notebook";
import { loadedPlotly, loadPlotly } from "./plotly";
import { sayUntilAnswered } from "./ready";
import { RunStore } from "./store";
import { decodePoints, FINAL_STATES, type KernelMessage, type PageMessage } from "./wire";

/** The part of anywidget's model that is used here. */
export interface Model {
  get(name: "key" | "slot" | "show_buttons" | "buttons" | "system_charts" | "plotly_gz"): unknown;
  send(content: PageMessage): void;
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  widget_manager?: unknown;
}

export type Change = "data" | "refused" | "kernel";

/** How long the notebook is given to take the last picture before the page looks for it. */
const PICTURE_PATIENCE_MS = 300;

/** How long a new panel is given to become part of the notebook before that is saved. */
const SAVE_AFTER_MS = 500;

/** The kernel tells of a run that goes on about twice a second. After this a page that hears nothing says so. */
const SILENCE_MS = 10_000;
const LISTEN_PERIOD_MS = 2000;

export class Link {
  readonly store = new RunStore();
  refusal = "";
  private readonly listeners = new Set<(change: Change) => void>();
  private readonly stopSaying: () => void;
  private readonly stopWatching: () => void;
  private readonly listening: ReturnType<typeof setInterval>;
  private heardMs = performance.now();
  private isKept = false;

  constructor(private readonly model: Model) {
    model.on("msg:custom", this.receive);
    this.stopWatching = watchKernel(model, () => this.kernelIsGone());
    this.listening = setInterval(() => this.measureSilence(), LISTEN_PERIOD_MS);
    const pushed = model.get("plotly_gz");
    if (ArrayBuffer.isView(pushed) && pushed.byteLength > 0) void loadPlotly(pushed);
    const wasPushed = ArrayBuffer.isView(pushed) && pushed.byteLength > 0;
    this.stopSaying = sayUntilAnswered(() =>
      model.send({ type: "ready", plotly: wasPushed || loadedPlotly() !== undefined }),
    );
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
    this.stopSaying();
    this.stopWatching();
    clearInterval(this.listening);
    this.listeners.clear();
  }

  listen(callback: (change: Change) => void): () => void {
    this.listeners.add(callback);
    return () => this.listeners.delete(callback);
  }

  command(command: "pause" | "resume" | "stop"): void {
    this.model.send({ type: "command", command });
  }

  /** Adds to the head that the notebook keeps what only the page has, and saves it: once, when the kernel is gone. */
  keepWithoutKernel(html: string): void {
    if (this.isKept) return;
    this.isKept = true;
    findPlace(this.model.widget_manager, `${this.slot}-head`)?.append(html);
    saveNotebook(this.model.widget_manager);
  }

  private readonly receive = (message: KernelMessage, buffers: ArrayBufferView[]): void => {
    this.heardMs = performance.now();
    this.store.silent_s = 0;
    switch (message.type) {
      case "snapshot":
        this.stopSaying();
        if (this.store.run === undefined) {
          setTimeout(() => saveNotebook(this.model.widget_manager), SAVE_AFTER_MS);
        }
        this.store.takeSnapshot(message, decodePoints(buffers));
        return this.tell("data");
      case "delta":
        this.store.takeDelta(message, decodePoints(buffers));
        return this.tell("data");
      case "plotly":
        void loadPlotly(buffers[0]);
        return;
      case "refused":
        this.refusal = message.text;
        return this.tell("refused");
      case "end":
        setTimeout(() => this.checkPicture(), PICTURE_PATIENCE_MS);
        return;
      case "bundle":
        for (const { slot, data, metadata } of message.outputs) {
          findPlace(this.model.widget_manager, slot)?.put(data, metadata);
        }
        this.model.send({ type: "stored" });
        return;
    }
  };

  private get slot(): string {
    return String(this.model.get("slot"));
  }

  /** The run is over: is its picture in the notebook? Only then can the widget go. */
  private checkPicture(): void {
    const place = findPlace(this.model.widget_manager, this.slot);
    const stored = place ? place.final === this.store.run?.id : !hasNotebook(this.model.widget_manager);
    if (stored) this.model.send({ type: "stored" });
    else if (place) this.model.send({ type: "bundle" });
    // A notebook without the output had its cell cleared or deleted: the panel may be shown elsewhere, and stays.
  }

  private get isOver(): boolean {
    const state = this.store.status?.state;
    return state === undefined || FINAL_STATES.has(state);
  }

  private kernelIsGone(): void {
    if (this.store.kernelIsGone || this.isOver) return;
    this.store.kernelIsGone = true;
    this.store.silent_s = 0;
    disableWidgets(this.model.widget_manager, (this.model.get("buttons") as string[] | undefined) ?? []);
    this.tell("kernel");
  }

  private measureSilence(): void {
    if (this.store.kernelIsGone || this.isOver) return;
    const silentMs = performance.now() - this.heardMs;
    if (silentMs < SILENCE_MS) return;
    this.store.silent_s = Math.round(silentMs / 1000);
    this.tell("kernel");
  }

  private tell(change: Change): void {
    for (const callback of this.listeners) callback(change);
  }
}
