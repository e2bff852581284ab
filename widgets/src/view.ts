// One view of a panel on the page: it puts the parts together and decides when to paint.

import {
  type Axis,
  type ChartSpec,
  CHARTS,
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
import { Header } from "./header";
import type { Link } from "./link";
import { type Plot, type PlotlyApi, whenPlotly } from "./plotly";
import { onThemeChange, themeOf } from "./theme";

const MIN_INTERVAL_MS = 200;
/** From one repaint to the next at least this many times as long as the last one took. */
const REST_PER_PAINT = 3;
const HEIGHT_PX = 210;
const ENLARGED_HEIGHT_PX = 420;

interface Card {
  spec: ChartSpec;
  root: HTMLElement;
  key: HTMLElement;
  enlarge: HTMLButtonElement;
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
  private readonly cards: Card[];
  private readonly toggleOf = new Map<string, HTMLButtonElement>();
  private readonly shown = new Set(CHARTS.filter((c) => c.shownAtFirst).map((c) => c.id));
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
  ) {
    this.header = new Header(link.store, (command) => link.command(command));
    this.header.showButtons(showButtons);
    this.cards = CHARTS.map((spec) => this.makeCard(spec));
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
    this.grid.append(...this.cards.map((card) => card.root));
    el.append(this.root);
    this.endings.push(
      link.listen((change) => {
        if (change === "refused") this.header.refuse(link.refusal);
        // Words cost next to nothing, and a person who pressed a button waits for them.
        else if (this.visible) this.paintWords();
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
    for (const card of this.cards) this.plotly?.purge(card.plot);
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
    for (const spec of CHARTS) {
      const toggle = this.toggleOf.get(spec.id);
      if (toggle) toggle.hidden = !hasData(store, spec) && !spec.shownAtFirst;
    }
  }

  private async paintCharts(): Promise<void> {
    const { store } = this.link;
    const theme = themeOf(this.root);
    const visible = this.cards.filter((card) => this.shown.has(card.spec.id));
    const maxPoints = pointsPerSeries(store, visible.map((card) => card.spec));
    for (const card of this.cards) {
      const shown = visible.includes(card);
      card.root.hidden = !shown;
      if (!shown) continue;
      const large = this.enlarged === card.spec.id;
      card.root.classList.toggle("nbgpu-large", large);
      this.paintKey(card);
      setAttribute(card.picture, "aria-label", inWords(store, card.spec));
      if (!this.plotly) continue;
      const height = large ? ENLARGED_HEIGHT_PX : HEIGHT_PX;
      const { traces, layout } = drawing(
        store,
        card.spec,
        this.axis,
        theme,
        height,
        maxPoints,
        this.logarithmic.has(card.spec.id),
        frameOf(card.plot),
      );
      await this.plotly.react(card.plot, traces, layout, { displayModeBar: false, responsive: false });
      if (!card.followsZoom && card.plot.on) {
        card.followsZoom = true;
        card.plot.on("plotly_relayout", () => this.changed());
      }
    }
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
      for (const card of this.cards) {
        const large = this.enlarged === card.spec.id;
        setText(card.enlarge, large ? "Shrink" : "Enlarge");
        setAttribute(card.enlarge, "aria-label", `${large ? "Shrink" : "Enlarge"} ${card.spec.title}`);
        setAttribute(card.enlarge, "aria-pressed", String(large));
      }
      this.changed();
    });
    const tools = element("span", "nbgpu-tools", {}, enlarge);
    if (spec.mayBeLogarithmic) {
      const log = makeToggle("Log", false, (pressed) => {
        if (pressed) this.logarithmic.add(spec.id);
        else this.logarithmic.delete(spec.id);
        this.changed();
      });
      log.setAttribute("aria-label", `${spec.title} on a logarithmic scale`);
      tools.prepend(log);
    }
    const key = element("span", "nbgpu-key", { "aria-hidden": "true" });
    const title = element("h4", "nbgpu-chart-title", {}, spec.title);
    if (spec.unit) title.append(element("span", "nbgpu-unit", {}, spec.unit));
    const plot = element("div", "nbgpu-plot");
    const picture = element("div", "nbgpu-picture", { role: "img", "aria-label": spec.title }, plot);
    const root = element(
      "section",
      "nbgpu-chart",
      { "aria-label": spec.title },
      element("div", "nbgpu-chart-head", {}, title, key, tools),
      picture,
    );
    root.dataset["chart"] = spec.id;
    return { spec, root, key, enlarge, picture, plot, followsZoom: false };
  }

  private makeToggles(): void {
    for (const spec of CHARTS) {
      const toggle = makeToggle(spec.short ?? spec.title, this.shown.has(spec.id), (pressed) => {
        if (pressed) this.shown.add(spec.id);
        else this.shown.delete(spec.id);
        this.changed();
      });
      toggle.title = spec.title;
      this.toggleOf.set(spec.id, toggle);
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

function makeToggle(label: string, pressed: boolean, onChange: (pressed: boolean) => void): HTMLButtonElement {
  const button = element("button", "nbgpu-toggle", { type: "button", "aria-pressed": String(pressed) }, label);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    onChange(now);
  });
  return button;
}
