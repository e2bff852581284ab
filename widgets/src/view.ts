// One view of a panel on the page: it puts the parts together and decides when to paint.

import {
  type Axis,
  type ChartGroup,
  type ChartSpec,
  drawing,
  type Frame,
  hasData,
  inWords,
  keyOf,
  MARGIN,
  markName,
  pointsPerSeries,
} from "./charts";
import { Chips } from "./chips";
import { element, setAttribute, setText } from "./dom";
import { Header, progressInWords } from "./header";
import type { Link } from "./link";
import { type Plot, type PlotlyApi, whenPlotly } from "./plotly";
import { onThemeChange, themeOf } from "./theme";

const MIN_INTERVAL_MS = 200;
/** From one repaint to the next at least this many times as long as the last one took. */
const REST_PER_PAINT = 3;
const HEIGHT_PX = 210;
const ENLARGED_HEIGHT_PX = 420;
const MIN_KEPT_WIDTH_PX = 400;

interface Card {
  spec: ChartSpec;
  root: HTMLElement;
  key: HTMLElement;
  note: HTMLElement;
  enlarge: HTMLButtonElement;
  reset: HTMLButtonElement;
  resets: number;
  /** The same at the last drawing: where it was less, the range on the screen is one that was taken back. */
  resetsDrawn: number;
  picture: HTMLElement;
  plot: Plot;
  /** Whether zooming repaints it, with the points that it then needs. */
  followsZoom: boolean;
}

export class View {
  private readonly root = element("section", "nbgpu", { "aria-label": "Training run" });
  private readonly header: Header;
  private readonly chips = new Chips();
  private readonly toggles = element("div", "nbgpu-toggles", { role: "group", "aria-label": "Charts shown" });
  private readonly axes = element("div", "nbgpu-toggles", { role: "group", "aria-label": "Charts over" });
  private readonly grid = element("div", "nbgpu-charts");
  private readonly pace = element("p", "nbgpu-pace");
  private readonly hang = element("p", "nbgpu-hang");
  private readonly eventsTitle = element("summary", "");
  private readonly eventsList = element("ol", "");
  private readonly events = element("details", "nbgpu-events", {}, this.eventsTitle, this.eventsList);
  /** By the chart's id, in the order in which they came. */
  private readonly cards = new Map<string, Card>();
  private readonly toggleOf = new Map<string, HTMLButtonElement>();
  private readonly shown: Set<string>;
  private readonly logarithmic = new Set<string>();
  private axis: Axis = "step";
  private enlarged: string | undefined;
  private plotly: PlotlyApi | undefined;
  private onScreen = true;
  private dirty = true;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private restUntil = 0;
  private closed = false;
  private readonly endings: (() => void)[] = [];

  constructor(
    el: HTMLElement,
    private readonly link: Link,
    showButtons: boolean,
    private readonly groups: readonly ChartGroup[],
  ) {
    this.shown = new Set(groups.filter((g) => g.shownAtFirst).map((g) => g.id));
    this.header = new Header(link.store, (command) => link.command(command));
    this.header.showButtons(showButtons);
    this.makeToggles();
    this.root.append(
      this.header.root,
      this.hang,
      this.chips.root,
      element("div", "nbgpu-toolbar", {}, this.toggles, this.axes),
      this.grid,
      this.pace,
      this.events,
    );
    el.append(this.root);
    this.endings.push(
      link.listen((change) => {
        if (change === "refused") this.header.refuse(link.refusal);
        // Words cost next to nothing, and a person who pressed a button waits for them.
        else if (this.visible) this.paintWords();
        if (change === "kernel" && link.store.kernelIsGone) void this.keepPictures();
        this.changed();
      }),
      onThemeChange(() => this.changed()),
      this.watchVisibility(),
      this.watchWidth(),
    );
    whenPlotly((api) => {
      this.plotly = api;
      this.changed();
    });
    this.changed();
  }

  close(): void {
    this.closed = true;
    clearTimeout(this.timer);
    for (const end of this.endings) end();
    for (const card of this.cards.values()) this.plotly?.purge(card.plot);
    this.root.remove();
  }

  /** Something is new: paint soon, but not too often, and not while nobody can see it. */
  private changed(): void {
    this.dirty = true;
    if (this.timer !== undefined || this.closed || !this.visible) return;
    const wait = Math.max(0, this.restUntil - performance.now());
    this.timer = setTimeout(() => void this.paint(), wait);
  }

  private get visible(): boolean {
    return this.onScreen && !document.hidden;
  }

  private async paint(): Promise<void> {
    const started = performance.now();
    try {
      if (this.visible && !this.closed) {
        this.dirty = false;
        this.paintWords();
        await this.paintCharts();
      }
    } finally {
      const took = performance.now() - started;
      this.restUntil = started + Math.max(MIN_INTERVAL_MS, REST_PER_PAINT * took);
      this.timer = undefined;
      if (this.dirty) this.changed();
    }
  }

  private paintWords(): void {
    const { store } = this.link;
    this.header.update();
    this.chips.update(store);
    this.root.classList.toggle("nbgpu-gone", store.kernelIsGone);
    setText(this.pace, store.status?.pace ?? "");
    setText(this.hang, store.kernelIsGone ? "" : (store.status?.hang ?? ""));
    this.events.hidden = store.marks.length === 0;
    setText(this.eventsTitle, `What happened (${store.marks.length})`);
    while (this.eventsList.children.length > store.marks.length) this.eventsList.lastChild?.remove();
    for (const mark of store.marks.slice(this.eventsList.children.length)) {
      const name = markName(mark);
      const text = mark.text && mark.text !== name ? `: ${mark.text}` : "";
      this.eventsList.append(element("li", "", {}, `step ${mark.step}, ${name}${text}`));
    }
    for (const group of this.groups) {
      const toggle = this.toggleOf.get(group.id);
      if (toggle) toggle.hidden = this.chartsOf(group).length === 0;
    }
  }

  /** The charts of a group that have something to show, or a place of their own before. */
  private chartsOf(group: ChartGroup): ChartSpec[] {
    const { store } = this.link;
    return group.charts(store).filter((spec) => group.always === true || hasData(store, spec));
  }

  /** The cards on the page, in order; one that is new gets its place among the others. */
  private visibleCards(): Card[] {
    const specs = this.groups.filter((group) => this.shown.has(group.id)).flatMap((group) => this.chartsOf(group));
    const visible = specs.map((spec) => {
      const card = this.cards.get(spec.id) ?? this.makeCard(spec);
      this.cards.set(spec.id, card);
      return card;
    });
    visible.forEach((card, i) => {
      if (this.grid.contains(card.root)) return;
      const next = visible.slice(i + 1).find((other) => this.grid.contains(other.root));
      this.grid.insertBefore(card.root, next?.root ?? null);
    });
    return visible;
  }

  private async paintCharts(): Promise<void> {
    const { store } = this.link;
    const theme = themeOf(this.root);
    const visible = this.visibleCards();
    const maxPoints = pointsPerSeries(store, visible.map((card) => card.spec));
    for (const card of this.cards.values()) {
      const shown = visible.includes(card);
      card.root.hidden = !shown;
      if (!shown) continue;
      const large = this.enlarged === card.spec.id;
      card.root.classList.toggle("nbgpu-large", large);
      this.paintKey(card);
      setText(card.note, card.spec.note?.(store) ?? "");
      setAttribute(card.picture, "aria-label", inWords(store, card.spec));
      if (!this.plotly) continue;
      const height = large ? ENLARGED_HEIGHT_PX : HEIGHT_PX;
      const frame = { ...frameOf(card.plot), resets: card.resets };
      if (card.resetsDrawn < card.resets) delete frame.range;
      card.resetsDrawn = card.resets;
      const { traces, layout } = drawing(
        store,
        card.spec,
        this.axis,
        theme,
        height,
        maxPoints,
        this.logarithmic.has(card.spec.id),
        frame,
      );
      card.reset.hidden = !hasData(store, card.spec) || !isZoomed(card);
      await this.plotly.react(card.plot, traces, layout, { displayModeBar: false, responsive: false, showTips: false });
      if (!card.followsZoom && card.plot.on) {
        card.followsZoom = true;
        card.plot.on("plotly_relayout", () => this.changed());
      }
    }
  }

  /** Leaves the curves in the notebook as pictures: with the kernel, the panel is gone after the next reload. */
  private async keepPictures(): Promise<void> {
    const { store } = this.link;
    const words = element("p", "", {}, `${store.run?.recipe} ${store.run?.id}. ${progressInWords(store)}`);
    const kept = element("div", "nbgpu-still nbgpu-still-live", {}, words);
    for (const card of this.cards.values()) {
      if (card.root.hidden || !this.plotly || !hasData(store, card.spec)) continue;
      const size = { width: Math.max(card.plot.clientWidth, MIN_KEPT_WIDTH_PX), height: HEIGHT_PX };
      const src = await this.plotly.toImage(card.plot, { format: "svg", ...size });
      const { title, unit } = card.spec;
      const about = inWords(store, card.spec);
      kept.append(element("p", "", {}, unit ? `${title} (${unit})` : title), element("img", "", { src, alt: about }));
    }
    this.link.keepWithoutKernel(kept.outerHTML);
  }

  private paintKey(card: Card): void {
    const key = keyOf(this.link.store, card.spec);
    const said = key.map((k) => k.label).join();
    if (card.key.dataset["said"] === said) return;
    card.key.dataset["said"] = said;
    card.key.replaceChildren(
      ...key.map(({ label, style, color }) => {
        const line = element("span", `nbgpu-line nbgpu-line-${style}`);
        if (color) line.style.color = color;
        return element("span", "nbgpu-key-item", {}, line, label);
      }),
    );
  }

  private makeCard(spec: ChartSpec): Card {
    const enlarge = element("button", "nbgpu-enlarge", { type: "button", "aria-pressed": "false" }, "Enlarge");
    enlarge.setAttribute("aria-label", `Enlarge ${spec.title}`);
    enlarge.addEventListener("click", () => {
      this.enlarged = this.enlarged === spec.id ? undefined : spec.id;
      for (const card of this.cards.values()) {
        const large = this.enlarged === card.spec.id;
        setText(card.enlarge, large ? "Shrink" : "Enlarge");
        setAttribute(card.enlarge, "aria-label", `${large ? "Shrink" : "Enlarge"} ${card.spec.title}`);
        setAttribute(card.enlarge, "aria-pressed", String(large));
      }
      this.changed();
    });
    const reset = element("button", "nbgpu-toggle", { type: "button" }, "Reset zoom");
    reset.setAttribute("aria-label", `Reset the zoom of ${spec.title}`);
    reset.hidden = true;
    const tools = element("span", "nbgpu-tools", {}, reset, enlarge);
    if (spec.mayBeLogarithmic) {
      const log = makeToggle("Log", false, (pressed) => {
        if (pressed) this.logarithmic.add(spec.id);
        else this.logarithmic.delete(spec.id);
        this.changed();
      });
      log.setAttribute("aria-label", `${spec.title} on a logarithmic scale`);
      enlarge.before(log);
    }
    const key = element("span", "nbgpu-key", { "aria-hidden": "true" });
    const title = element("h4", "nbgpu-chart-title", {}, spec.title);
    if (spec.unit) title.append(element("span", "nbgpu-unit", {}, spec.unit));
    const plot = element("div", "nbgpu-plot");
    const picture = element("div", "nbgpu-picture", { role: "img", "aria-label": spec.title }, plot);
    const note = element("p", "nbgpu-note");
    const root = element(
      "section",
      "nbgpu-chart",
      { "aria-label": spec.title },
      element("div", "nbgpu-chart-head", {}, title, key, tools),
      note,
      picture,
    );
    root.dataset["chart"] = spec.id;
    const card: Card = { spec, root, key, note, enlarge, reset, resets: 0, resetsDrawn: 0, picture, plot, followsZoom: false };
    reset.addEventListener("click", () => {
      card.resets += 1;
      reset.hidden = true;
      // The button goes with the zoom, and the keyboard stays at this chart.
      enlarge.focus();
      this.changed();
    });
    return card;
  }

  private makeToggles(): void {
    for (const group of this.groups) {
      const toggle = makeToggle(group.label, this.shown.has(group.id), (pressed) => {
        if (pressed) this.shown.add(group.id);
        else this.shown.delete(group.id);
        this.changed();
      });
      toggle.title = group.title;
      this.toggleOf.set(group.id, toggle);
      this.toggles.append(toggle);
    }
    this.axes.append(element("span", "nbgpu-label", { "aria-hidden": "true" }, "over"));
    const choices = new Map<Axis, HTMLButtonElement>();
    for (const axis of ["step", "time"] as const) {
      const choice = makeToggle(axis, axis === this.axis, () => {
        this.axis = axis;
        for (const [name, button] of choices) setAttribute(button, "aria-pressed", String(name === axis));
        this.changed();
      });
      choices.set(axis, choice);
      this.axes.append(choice);
    }
  }

  private watchVisibility(): () => void {
    const observer = new IntersectionObserver((entries) => {
      this.onScreen = entries[entries.length - 1].isIntersecting;
      if (this.visible && this.dirty) this.changed();
    });
    observer.observe(this.root);
    const onShown = () => {
      if (this.visible && this.dirty) this.changed();
    };
    document.addEventListener("visibilitychange", onShown);
    return () => {
      observer.disconnect();
      document.removeEventListener("visibilitychange", onShown);
    };
  }

  private watchWidth(): () => void {
    let width = 0;
    const observer = new ResizeObserver((entries) => {
      const now = Math.round(entries[0].contentRect.width);
      if (now === width) return;
      width = now;
      this.changed();
    });
    observer.observe(this.grid);
    return () => observer.disconnect();
  }
}

/** What of a chart is on the screen, as far as Plotly has drawn it before. */
function frameOf(plot: Plot): Frame {
  const frame: Frame = {};
  const width = plot.clientWidth - MARGIN.l - MARGIN.r;
  if (width > 0) frame.columns = Math.ceil(width * (window.devicePixelRatio || 1));
  const axis = plot.layout?.xaxis;
  if (axis?.autorange === false && axis.range) frame.range = axis.range;
  return frame;
}

/** Whether the person sees a part of the chart only. */
function isZoomed(card: Card): boolean {
  const { xaxis, yaxis } = card.plot.layout ?? {};
  const [low, high] = yaxis?.range ?? [0, 0];
  const isOtherRange = card.spec.top === undefined ? yaxis?.autorange === false : low !== 0 || high !== card.spec.top;
  return xaxis?.autorange === false || (yaxis !== undefined && isOtherRange);
}

function makeToggle(label: string, pressed: boolean, onChange: (pressed: boolean) => void): HTMLButtonElement {
  const button = element("button", "nbgpu-toggle", { type: "button", "aria-pressed": String(pressed) }, label);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    onChange(now);
  });
  return button;
}
