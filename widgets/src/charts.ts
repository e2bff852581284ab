// Which charts there are, and what Plotly is told to draw.

import { number } from "./format";
import { bandOf, type Columns, keepExtremes, type Series, smoothed } from "./series";
import type { RunStore } from "./store";
import type { Theme } from "./theme";
import type { Mark, SystemChart } from "./wire";

export type Axis = "step" | "time";

type Style = "raw" | "bold" | "solid" | "dash" | "dot";

interface Line {
  name: string;
  style: Style;
  /** In words, for the key beside the title; left out where a rank's colour says it all. */
  label?: string;
  /** A number that all ranks share is drawn once, in the colour of text. */
  shared?: boolean;
  scale?: number;
}

export interface ChartSpec {
  id: string;
  title: string;
  unit: string;
  lines: (store: RunStore) => Line[];
  mayBeLogarithmic?: boolean;
  fromZero: boolean;
  worse: (a: number, b: number) => boolean;
  /** A sentence that keeps the chart from being misread; else empty. */
  note?: (store: RunStore) => string;
  /** A limit worth a line of its own, in the chart's unit. */
  ceilings?: (store: RunStore) => number[];
  top?: number;
}

/** The charts that one button of the panel shows. */
export interface ChartGroup {
  id: string;
  /** On the button. */
  label: string;
  /** What the button says on hover. */
  title: string;
  shownAtFirst: boolean;
  /** The button is there before there is anything to draw. */
  always?: boolean;
  charts: (store: RunStore) => ChartSpec[];
}

const more = (a: number, b: number) => a > b;
const less = (a: number, b: number) => a < b;

const LOSS_OF_VALIDATION = "val_loss";
const RATE_OF = "lr_of_";
/** What the names of the ends of a value's 95 % interval end in, each with its label. */
const ENDS = { _low: "95 % interval from", _high: "95 % interval to" };

/** Series that the recipe does not measure, beside those of the system charts. */
const NOT_OF_RECIPE = ["loss", "lr", "compute_s", "utilization_lost_percent"];

const UNITS: Record<string, string> = { db: "dB", s: "s", percent: "%", bytes: "bytes", nm: "nm", mm: "mm" };

/** The name of a series as words, and its unit: 'val_psnr_db' becomes 'psnr' and 'dB'. */
export function readable(name: string): { words: string; unit: string } {
  const words = name.replace(/^val_/, "").split("_");
  const unit = words.length > 1 ? UNITS[words[words.length - 1]] : undefined;
  return { words: (unit === undefined ? words : words.slice(0, -1)).join(" "), unit: unit ?? "" };
}

function namesOf(store: RunStore, isMeant: (name: string) => boolean): string[] {
  return [...new Set(store.series.map((s) => s.name))].filter(isMeant).sort();
}

function differ(store: RunStore): boolean {
  return (store.run?.why_losses_differ ?? "") !== "";
}

/** A chart for each value of the validations, under its name: their scales differ. */
function ofValidation(store: RunStore): ChartSpec[] {
  const all = new Set(namesOf(store, (name) => name.startsWith("val_")));
  const endsAnInterval = (name: string) =>
    Object.keys(ENDS).some((end) => name.endsWith(end) && all.has(name.slice(0, -end.length)));
  const isMeant = (name: string) =>
    all.has(name) && !endsAnInterval(name) && (name !== LOSS_OF_VALIDATION || differ(store));
  return namesOf(store, isMeant).map((name) => {
    const { words, unit } = readable(name);
    const ends = Object.entries(ENDS).filter(([end]) => all.has(name + end));
    return {
      id: name,
      title: `Validation: ${words}`,
      unit,
      lines: () => [
        { name, style: "dot", label: "validation", shared: true },
        ...ends.map(([end, label]) => ({ name: name + end, style: "dash" as const, label, shared: true })),
      ],
      note: (now: RunStore) => (name === LOSS_OF_VALIDATION ? (now.run?.why_losses_differ ?? "") : ""),
      mayBeLogarithmic: true,
      fromZero: false,
      worse: more,
    };
  });
}

/** A chart for each other number that the recipe names, such as the terms of its loss: their scales differ. */
function ofRecipe(store: RunStore, others: ReadonlySet<string>): ChartSpec[] {
  const isMeant = (name: string) => !others.has(name) && !name.startsWith("val_") && !name.startsWith(RATE_OF);
  return namesOf(store, isMeant).map((name) => {
    const { words, unit } = readable(name);
    return { id: name, title: words, unit, lines: () => noisy(name), mayBeLogarithmic: true, fromZero: false, worse: more };
  });
}

function noisy(name: string): Line[] {
  return [
    { name, style: "raw", label: "raw" },
    { name, style: "bold", label: "smoothed" },
  ];
}

const LOSS: ChartSpec = {
  id: "loss",
  title: "Loss",
  unit: "",
  lines: (store) => [
    ...noisy("loss"),
    ...(differ(store) ? [] : [{ name: LOSS_OF_VALIDATION, style: "dot" as const, label: "validation", shared: true }]),
  ],
  mayBeLogarithmic: true,
  fromZero: false,
  worse: more,
};

function systemChart(chart: SystemChart): ChartGroup {
  const scale = 1 / (chart.divisor ?? 1);
  const { id, button, title, unit, top } = chart;
  const spec: ChartSpec = {
    id,
    title,
    unit,
    lines: () => chart.lines.map(([name, style, label]) => ({ name, style, scale, ...(label === undefined ? {} : { label }) })),
    fromZero: true,
    mayBeLogarithmic: chart.may_be_logarithmic ?? false,
    worse: chart.worse === "more" ? more : less,
    ...(top === undefined ? {} : { top }),
    ceilings: (store) =>
      chart.ceiling === "memory_bytes"
        ? [...new Set(store.ranks.filter((r) => r.kind === "cuda").map((r) => r.memory_bytes * scale))]
        : [],
  };
  return just(spec, button, chart.at_first ?? false);
}

const DASHES: Style[] = ["dash", "dot"];

const RATE: ChartSpec = {
  id: "lr",
  title: "Learning rate",
  unit: "",
  lines: (store) => [
    { name: "lr", style: "solid", shared: true, label: "lr" },
    ...namesOf(store, (name) => name.startsWith(RATE_OF)).map((name, i) => ({
      name,
      style: DASHES[i % DASHES.length],
      shared: true,
      label: name.slice(RATE_OF.length),
    })),
  ],
  fromZero: true,
  worse: more,
};

function just(spec: ChartSpec, label: string, shownAtFirst: boolean): ChartGroup {
  const charts = () => [spec];
  return { id: spec.id, label, title: spec.title, shownAtFirst, always: shownAtFirst, charts };
}

/** The groups of a panel, in the order of its buttons. */
export function groupsOf(system: readonly SystemChart[]): ChartGroup[] {
  const others = new Set([...NOT_OF_RECIPE, ...system.flatMap((chart) => chart.lines.map(([name]) => name))]);
  return [
    just(LOSS, "Loss", true),
    {
      id: "validation",
      label: "Validation",
      title: "What the validations measure, each value with an axis of its own",
      shownAtFirst: true,
      charts: ofValidation,
    },
    ...system.filter((chart) => chart.at_first).map(systemChart),
    {
      id: "terms",
      label: "Terms",
      title: "The terms of the loss, and what else the recipe measures in each step, each with an axis of its own",
      shownAtFirst: false,
      charts: (store) => ofRecipe(store, others),
    },
    ...system.filter((chart) => !chart.at_first).map(systemChart),
    just(RATE, "LR", false),
  ];
}

export const MAX_POINTS_ON_SCREEN = 48_000;
/** Beside the plot itself, in pixels. */
export const MARGIN = { l: 52, r: 14, t: 14, b: 36 };
/** Where the page does not say how wide a chart is. */
const USUAL_WIDTH_PX = 600;
/** Above this many ranks a chart shows a band in place of lines. */
export const MAX_RANKS_AS_LINES = 16;
const MAX_MARKS = 30;
const BAND_BINS = 200;

/** Points that each series may have when `charts` are on the screen together. */
export function pointsPerSeries(store: RunStore, charts: readonly ChartSpec[]): number {
  let lines = 0;
  for (const chart of charts) {
    for (const line of chart.lines(store)) lines += store.named(line.name).length;
  }
  return Math.max(8, Math.floor(MAX_POINTS_ON_SCREEN / Math.max(lines, 1)));
}

export function hasData(store: RunStore, chart: ChartSpec): boolean {
  return chart.lines(store).some((line) => store.named(line.name).length > 0);
}

/** Thin is faint enough: a line that is fainter, too, cannot be seen on a dark page. */
const RAW_OPACITY = 0.85;
const DASH: Record<Style, string> = { raw: "solid", bold: "solid", solid: "solid", dash: "6px,3px", dot: "2px,3px" };
const WIDTH: Record<Style, number> = { raw: 1, bold: 2.5, solid: 1.8, dash: 1.5, dot: 2 };

function faded(color: string, opacity: number): string {
  const channels = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return `rgba(${channels.join(",")},${opacity})`;
}

export interface Drawing {
  traces: object[];
  layout: object;
}

/** What of a chart is on the screen. */
export interface Frame {
  /** Columns of pixels in the plot, where they are known. */
  columns?: number;
  /** What the person zoomed to, if they did. */
  range?: [number, number];
  /** Counts how often the person has taken a zoom back. */
  resets?: number;
}

/** What Plotly draws for one chart. */
export function drawing(
  store: RunStore,
  chart: ChartSpec,
  axis: Axis,
  theme: Theme,
  height: number,
  maxPoints: number,
  logarithmic = false,
  frame: Frame = {},
): Drawing {
  const started = store.run?.started_s ?? 0;
  const xOf = (s: Series) => (axis === "step" ? s.step : s.time_s.map((t) => t - started));
  const traces: object[] = [];
  const lines = chart.lines(store).map((line) => ({ line, series: store.named(line.name) }));
  const xEnd = Math.max(0, ...lines.flatMap(({ series }) => series.map((s) => xOf(s).at(-1) ?? 0)));
  const [low, high] = frame.range ?? [0, xEnd];
  // Two points of each column, beside those at the ends.
  const count = Math.max(1, Math.min(frame.columns ?? USUAL_WIDTH_PX, Math.floor((maxPoints - 4) / 2)));
  const columns = { low, high, count };
  for (const { line, series } of lines) {
    const scale = line.scale ?? 1;
    if (line.shared) series.splice(1);
    if (series.length > MAX_RANKS_AS_LINES) {
      if (line.style !== "raw") traces.push(...bandTraces(store, chart, line, series, xOf, theme, columns));
    } else {
      for (const s of series) {
        traces.push(lineTrace(store, line, s, xOf(s), shownValues(line, s), scale, theme, columns));
      }
    }
  }
  const isEmpty = traces.length === 0;
  for (const ceiling of isEmpty ? [] : (chart.ceilings?.(store) ?? [])) {
    traces.push({
      type: "scatter",
      mode: "lines",
      x: [0, xEnd],
      y: [ceiling, ceiling],
      line: { color: theme.muted, width: 1, dash: "1px,3px" },
      hoverinfo: "skip",
    });
  }
  const layout = layoutOf(store, chart, axis, theme, height, started, logarithmic, xEnd, frame.resets ?? 0);
  return { traces, layout: isEmpty ? { ...layout, ...nothingIn(store, theme) } : layout };
}

/** In place of axes over numbers that nobody has measured. */
function nothingIn(store: RunStore, theme: Theme): object {
  const text = (store.status?.step ?? 0) > 0 ? "nothing recorded" : "no step yet";
  const place = { xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false };
  const axis = { visible: false, fixedrange: true };
  return { xaxis: axis, yaxis: axis, shapes: [], annotations: [{ ...place, text, font: { color: theme.muted, size: 13 } }] };
}

function shownValues(line: Line, series: Series): readonly number[] {
  return line.style === "bold" ? smoothed(series.value) : series.value;
}

/** The rank whose newest value is the worst of all. */
function worstOf(chart: ChartSpec, series: readonly Series[]): Series {
  return series.reduce((worst, s) => (chart.worse(s.newest, worst.newest) ? s : worst));
}

function lineTrace(
  store: RunStore,
  line: Line,
  series: Series,
  x: readonly number[],
  y: readonly number[],
  scale: number,
  theme: Theme,
  columns: Columns,
): object {
  const kept = keepExtremes(x, y, columns);
  const color = line.shared ? theme.text : (store.ranks[series.rank]?.color ?? theme.text);
  const who = line.shared ? (line.label ?? line.name) : `rank ${series.rank}${line.label ? `, ${line.label}` : ""}`;
  // Few points far apart, as validation has, are hard to see without dots.
  const sparse = kept.length === 1 || (line.shared === true && kept.length < 60);
  if (line.style === "raw") return rawTrace(series, kept, x, y, scale, color);
  return {
    type: "scatter",
    mode: sparse ? "lines+markers" : "lines",
    // The newest dot stands on the chart's edge.
    cliponaxis: !sparse,
    name: who,
    x: kept.map((i) => x[i]),
    y: kept.map((i) => y[i] * scale),
    // The raw line says what this one has beside it.
    ...(line.style === "bold" ? { hoverinfo: "skip" } : { hovertemplate: `${who}: %{y:.4g}<extra></extra>` }),
    marker: { size: 5, color },
    line: { color, width: WIDTH[line.style], dash: DASH[line.style] },
  };
}

/** What was measured, thin, with a dot at the newest value, which the smoothed line never hides. */
function rawTrace(
  series: Series,
  kept: readonly number[],
  x: readonly number[],
  y: readonly number[],
  scale: number,
  color: string,
): object {
  const line = smoothed(series.value);
  const who = `rank ${series.rank}`;
  return {
    type: "scatter",
    mode: "lines+markers",
    cliponaxis: false,
    name: `${who}, raw`,
    x: kept.map((i) => x[i]),
    y: kept.map((i) => y[i] * scale),
    customdata: kept.map((i) => line[i] * scale),
    hovertemplate: `${who}: %{y:.4g}, smoothed %{customdata:.4g}<extra></extra>`,
    marker: { size: kept.map((_, i) => (i === kept.length - 1 ? 7 : 0)), color },
    line: { color: faded(color, RAW_OPACITY), width: WIDTH.raw },
  };
}

function bandTraces(
  store: RunStore,
  chart: ChartSpec,
  line: Line,
  series: Series[],
  xOf: (s: Series) => readonly number[],
  theme: Theme,
  columns: Columns,
): object[] {
  const band = bandOf(series, xOf, Math.min(BAND_BINS, columns.count));
  const scaled = (y: number[]) => y.map((v) => v * (line.scale ?? 1));
  const worst = worstOf(chart, series);
  const fill = { mode: "lines", type: "scatter", line: { width: 0 }, hoverinfo: "skip", x: band.x };
  const hover = (who: string) => ({
    name: who,
    hoverinfo: "all",
    hovertemplate: `${who}${line.style === "bold" ? ", smoothed" : ""}: %{y:.4g}<extra></extra>`,
  });
  return [
    { ...fill, y: scaled(band.low) },
    { ...fill, y: scaled(band.high), fill: "tonexty", fillcolor: faded("#808080", 0.25) },
    {
      type: "scatter",
      mode: "lines",
      x: band.x,
      y: scaled(band.mean),
      line: { color: theme.text, width: 1.8, dash: DASH[line.style] },
      ...hover(`mean of ${series.length} ranks`),
    },
    {
      ...lineTrace(store, line, worst, xOf(worst), shownValues(line, worst), line.scale ?? 1, theme, columns),
      ...hover(`rank ${worst.rank}, the worst`),
    },
  ];
}

const SYMBOLS: Record<string, string> = { checkpoint: "◆", paused: "‖", failure: "✕", failed: "✕", nonfinite: "▲", note: "●" };

const BAD_KINDS = ["failure", "nonfinite"];

export function markName(mark: Mark): string {
  return mark.kind === "state" ? mark.text : mark.kind;
}

function layoutOf(
  store: RunStore,
  chart: ChartSpec,
  axis: Axis,
  theme: Theme,
  height: number,
  started: number,
  logarithmic: boolean,
  xEnd: number,
  resets: number,
): object {
  const marks = store.marks.slice(-MAX_MARKS).map((mark) => ({
    x: axis === "step" ? mark.step : mark.time_s - started,
    name: markName(mark),
    text: mark.text,
    color: BAD_KINDS.includes(mark.kind) || mark.text === "failed" ? theme.danger : theme.muted,
  }));
  const common = {
    gridcolor: theme.grid,
    linecolor: theme.grid,
    zeroline: false,
    tickfont: { size: 11 },
    fixedrange: false,
  };
  return {
    height,
    autosize: true,
    margin: MARGIN,
    paper_bgcolor: "rgba(0,0,0,0)",
    // Plotly puts a stripe of this colour behind the line at the pointer; of a transparent one it makes white.
    plot_bgcolor: theme.surface,
    font: { color: theme.muted, family: theme.font, size: 12 },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: theme.surface, bordercolor: theme.grid, font: { color: theme.text, size: 11 } },
    // While this stays the same, Plotly keeps the range to which the person zoomed.
    uirevision: `${axis} ${logarithmic} ${resets}`,
    xaxis: {
      ...common,
      rangemode: "tozero",
      // No room behind the last point, so that the columns of points are those of the pixels.
      ...(xEnd > 0 ? { autorangeoptions: { clipmin: 0, clipmax: xEnd } } : {}),
      nticks: 7,
      // The line where the pointer is.
      spikecolor: theme.muted,
      spikethickness: 1,
      spikedash: "solid",
      unifiedhovertitle: { text: axis === "step" ? "step %{x}" : "%{x:.1f} s" },
      title: { text: axis === "step" ? "step" : "seconds since the start", standoff: 4, font: { size: 11 } },
    },
    yaxis: {
      ...common,
      nticks: 6,
      type: logarithmic ? "log" : "linear",
      tickformat: chart.id === "lr" ? ".1e" : ".6~g",
      rangemode: chart.fromZero ? "tozero" : "normal",
      ...(chart.top === undefined ? {} : { range: [0, chart.top] }),
    },
    shapes: marks.map((mark) => ({
      type: "line",
      x0: mark.x,
      x1: mark.x,
      yref: "y domain",
      y0: 0,
      y1: 1,
      line: { color: mark.color, width: 1, dash: "2px,3px" },
    })),
    annotations: marks.map((mark) => ({
      x: mark.x,
      y: 1,
      yref: "y domain",
      yanchor: "bottom",
      showarrow: false,
      text: SYMBOLS[mark.name] ?? "●",
      hovertext: `${mark.name}: ${mark.text}`,
      font: { color: mark.color, size: 10 },
    })),
  };
}

/** The newest values in words, for those who do not see the chart. */
export function inWords(store: RunStore, chart: ChartSpec): string {
  const parts: string[] = [];
  const unit = chart.unit ? ` ${chart.unit}` : "";
  for (const line of chart.lines(store)) {
    if (line.style === "raw") continue;
    const scale = line.scale ?? 1;
    const series = store.named(line.name);
    if (line.shared) {
      if (series.length > 0) parts.push(`${line.label ?? line.name} ${number(series[0].newest * scale)}${unit}`);
    } else if (series.length > MAX_RANKS_AS_LINES) {
      const values = series.map((s) => s.newest * scale);
      const range = `from ${number(Math.min(...values))} to ${number(Math.max(...values))}${unit}`;
      parts.push(`${series.length} ranks ${range}, the worst is rank ${worstOf(chart, series).rank}`);
    } else {
      const label = line.label && line.style !== "bold" ? ` ${line.label}` : "";
      for (const s of series) parts.push(`rank ${s.rank}${label} ${number(s.newest * scale)}${unit}`);
    }
  }
  return `${chart.title}: ${parts.length > 0 ? parts.join(", ") : "nothing yet"}`;
}

/** The styles of line that a chart uses now, for its key, and the worst rank where a band hides the others. */
export function keyOf(store: RunStore, chart: ChartSpec): { label: string; style: Style; color?: string }[] {
  const lines = chart.lines(store).filter((l) => store.named(l.name).length > 0);
  const first = lines.find((l) => store.named(l.name).length > MAX_RANKS_AS_LINES);
  if (first) {
    const worst = worstOf(chart, store.named(first.name));
    const color = store.ranks[worst.rank]?.color;
    return [
      { label: "mean", style: "solid" },
      { label: `worst: rank ${worst.rank}`, style: "bold", ...(color ? { color } : {}) },
    ];
  }
  const labelled = lines.filter((l) => l.label !== undefined);
  return labelled.length < 2 ? [] : labelled.map((l) => ({ label: l.label as string, style: l.style }));
}
