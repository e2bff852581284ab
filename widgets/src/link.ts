// One panel's line to the kernel. It lives as long as the widget does, whether or not a view is on the page, so that
// no message is lost before the first view is drawn.

import { findPlace, hasNotebook, saveNotebook } from "./notebook";
import { loadedPlotly, loadPlotly } from "./plotly";
import { RunStore } from "./store";
import { decodePoints, type KernelMessage, type PageMessage } from "./wire";

/** The part of anywidget's model that is used here. */
export interface Model {
  get(name: "key" | "slot" | "show_buttons" | "plotly_gz"): unknown;
  send(content: PageMessage): void;
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  widget_manager?: unknown;
}

export type Change = "data" | "refused";

/** How long the notebook is given to take the last picture before the page looks for it. */
const PICTURE_PATIENCE_MS = 300;

/** How long a new panel is given to become part of the notebook before that is saved. */
const SAVE_AFTER_MS = 500;

export class Link {
  readonly store = new RunStore();
  refusal = "";
  private readonly listeners = new Set<(change: Change) => void>();

  constructor(private readonly model: Model) {
    model.on("msg:custom", this.receive);
    const pushed = model.get("plotly_gz");
    if (ArrayBuffer.isView(pushed) && pushed.byteLength > 0) void loadPlotly(pushed);
    const plotly = loadedPlotly() !== undefined || (ArrayBuffer.isView(pushed) && pushed.byteLength > 0);
    model.send({ type: "ready", plotly });
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
    this.listeners.clear();
  }

  listen(callback: (change: Change) => void): () => void {
    this.listeners.add(callback);
    return () => this.listeners.delete(callback);
  }

  command(command: "pause" | "resume" | "stop"): void {
    this.model.send({ type: "command", command });
  }

  private readonly receive = (message: KernelMessage, buffers: ArrayBufferView[]): void => {
    switch (message.type) {
      case "snapshot":
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
        findPlace(this.model.widget_manager, this.slot)?.put(message.data, message.metadata);
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

  private tell(change: Change): void {
    for (const callback of this.listeners) callback(change);
  }
}
