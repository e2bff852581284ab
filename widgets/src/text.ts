// The text of a running cell. The kernel makes the HTML, here and in what stays in the notebook, so that both look the
// same; this puts it on the page and tells the kernel whose text is seen.

import { findPlace, saveNotebook, takeButtonsAway } from "./notebook";
import { sayUntilAnswered } from "./ready";
import type { MimeBundle } from "./wire";

/** The part of anywidget's model that is used here. */
export interface TextModel {
  get(name: "key" | "slot"): unknown;
  send(content: TextPageMessage): void;
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  widget_manager?: unknown;
}

export type TextPageMessage =
  | { type: "ready" }
  | { type: "chosen"; value: string }
  | { type: "bundle" }
  | { type: "stored" };

interface More {
  type: "more";
  /** Lines that go on with the last block. */
  tail: string;
  /** Blocks behind it. */
  html: string;
  /** What stands below now. */
  rows: string;
  /** Whether the ranks have said different things, so that there is something to choose. */
  differs: boolean;
}

export type TextMessage =
  | { type: "snapshot"; html: string }
  | More
  | { type: "end" }
  | { type: "bundle"; data: MimeBundle; metadata: MimeBundle };

/** How long the notebook is given to take the text that stays before the page looks for it. */
const TEXT_PATIENCE_MS = 300;

/** A cell that has run so long is worth finding again after a reload, which shows what was saved last. */
const SAVE_AFTER_MS = 2000;

/** One view of the text. */
export class TextView {
  constructor(
    private readonly root: HTMLElement,
    choose: (value: string) => void,
  ) {
    root.addEventListener("change", (event) => {
      if (event.target instanceof HTMLInputElement) choose(event.target.value);
    });
  }

  take(message: TextMessage): void {
    if (message.type === "snapshot") this.root.innerHTML = message.html;
    if (message.type === "more") this.append(message);
  }

  private append(more: More): void {
    const lines = this.root.querySelector(".nbgpu-lines");
    if (!lines) return;
    if (more.tail) lines.lastElementChild?.querySelector("pre")?.insertAdjacentHTML("beforeend", more.tail);
    if (more.html) lines.insertAdjacentHTML("beforeend", more.html);
    const rows = this.root.querySelector(".nbgpu-rows");
    if (rows && rows.innerHTML !== more.rows) rows.innerHTML = more.rows;
    this.root.querySelector(".nbgpu-whose")?.toggleAttribute("hidden", !more.differs);
  }
}

/** The line to the kernel. It lives as long as the widget does, so that nothing is lost before the first view. */
export class TextLink {
  private readonly views = new Set<TextView>();
  /** What a new view has to know: the last snapshot and what came since. */
  private known: TextMessage[] = [];
  private readonly stopSaying: () => void;
  private readonly save: ReturnType<typeof setTimeout>;

  constructor(private readonly model: TextModel) {
    model.on("msg:custom", this.receive);
    this.stopSaying = sayUntilAnswered(() => model.send({ type: "ready" }));
    this.save = setTimeout(() => saveNotebook(model.widget_manager), SAVE_AFTER_MS);
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
    this.stopSaying();
    clearTimeout(this.save);
    this.views.clear();
  }

  show(root: HTMLElement): () => void {
    const view = new TextView(root, (value) => this.model.send({ type: "chosen", value }));
    for (const message of this.known) view.take(message);
    this.views.add(view);
    return () => this.views.delete(view);
  }

  private readonly receive = (message: TextMessage): void => {
    switch (message.type) {
      case "snapshot":
        this.stopSaying();
        this.known = [message];
        break;
      case "more": {
        if (this.known.length === 0) return;
        const last = this.known.at(-1);
        // Rows come ten times a second for as long as the cell runs, and only the last ones count.
        if (last?.type === "more" && !last.tail && !last.html) this.known.pop();
        this.known.push(message);
        break;
      }
      case "end":
        this.stopSaying();
        clearTimeout(this.save);
        setTimeout(() => this.checkText(), TEXT_PATIENCE_MS);
        return;
      case "bundle":
        findPlace(this.model.widget_manager, this.slot)?.put(message.data, message.metadata);
        takeButtonsAway(this.model.widget_manager, this.slot);
        this.model.send({ type: "stored" });
        return;
    }
    for (const view of this.views) view.take(message);
  };

  private get slot(): string {
    return String(this.model.get("slot"));
  }

  /** The cell is over: is its text in the notebook? Only then can the widget go. */
  private checkText(): void {
    const place = findPlace(this.model.widget_manager, this.slot);
    this.model.send({ type: place && place.final !== this.slot ? "bundle" : "stored" });
  }
}

/** The links of this page by widget: anywidget gives `initialize` and `render` different objects for one model. */
const LINKS = Symbol.for("nbgpu.texts");

function links(): Map<string, TextLink> {
  const page = globalThis as unknown as Record<symbol, Map<string, TextLink> | undefined>;
  return (page[LINKS] ??= new Map());
}

function initialize({ model }: { model: TextModel }): () => void {
  const key = String(model.get("key"));
  links().get(key)?.close();
  const link = new TextLink(model);
  links().set(key, link);
  return () => {
    link.close();
    if (links().get(key) === link) links().delete(key);
  };
}

function render({ model, el }: { model: TextModel; el: HTMLElement }): () => void {
  const link = links().get(String(model.get("key")));
  if (!link) throw new Error("nbgpu: a cell's text was rendered before it was initialized");
  return link.show(el);
}

export default { initialize, render };
