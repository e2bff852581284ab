import { describe, expect, it } from "vitest";
import { CHARTS, type ChartSpec, drawing, inWords, keyOf, MAX_POINTS_ON_SCREEN, pointsPerSeries } from "../src/charts";
import { RunStore } from "../src/store";
import type { Theme } from "../src/theme";
import { points, snapshot } from "./run";

const THEME: Theme = { text: "#111", muted: "#666", grid: "#ccc", surface: "#fff", danger: "#d00", font: "sans" };

interface Trace {
  x: number[];
  y: number[];
  opacity?: number;
  hovertemplate?: string;
  line: { color: string; width: number; dash: string };
}

function chart(id: string): ChartSpec {
  return CHARTS.find((c) => c.id === id) as ChartSpec;
}

function traces(store: RunStore, id: string, axis: "step" | "time" = "step"): Trace[] {
  return drawing(store, chart(id), axis, THEME, 200, 500).traces as Trace[];
}

function storeOf(series: [number, string][], rows: [number, number, number, number][], ranks = 2): RunStore {
  const store = new RunStore();
  store.takeSnapshot(snapshot(series, {}, ranks), points(...rows));
  return store;
}

describe("the loss chart", () => {
  const store = storeOf(
    [
      [0, "loss"],
      [1, "loss"],
      [0, "val_loss"],
    ],
    [
      [0, 1001, 1, 2],
      [0, 1002, 2, 1],
      [1, 1001, 1, 3],
      [2, 1002, 2, 1.5],
    ],
  );

  it("draws each rank faint and bold in the rank's colour, and validation dotted in the text's", () => {
    const drawn = traces(store, "loss");
    expect(drawn.map((t) => t.line.color)).toEqual(["#0000ff", "#00ff00", "#0000ff", "#00ff00", "#111"]);
    expect(drawn[0].opacity).toBeLessThan(0.5);
    expect(drawn[2].line.width).toBeGreaterThan(drawn[0].line.width);
    expect(drawn[4].line.dash).not.toBe("solid");
  });

  it("goes over steps or over seconds since the start", () => {
    expect(traces(store, "loss")[0].x).toEqual([1, 2]);
    expect(traces(store, "loss", "time")[0].x).toEqual([1, 2]);
    expect(traces(store, "loss", "time")[4].x).toEqual([2]);
  });

  it("says its newest values in words", () => {
    expect(inWords(store, chart("loss"))).toBe("Loss: rank 0 1, rank 1 3, validation 1.5");
  });
});

describe("the memory chart", () => {
  it("draws reserved solid, allocated dashed, and the device's total as a ceiling", () => {
    const gib = 2 ** 30;
    const store = storeOf(
      [
        [0, "memory_reserved_bytes"],
        [0, "memory_allocated_bytes"],
      ],
      [
        [0, 1001, 1, 4 * gib],
        [1, 1001, 1, 3 * gib],
      ],
    );
    const [reserved, allocated, ceiling] = traces(store, "memory");
    expect([reserved.y, allocated.y]).toEqual([[4], [3]]);
    expect(reserved.line.dash).toBe("solid");
    expect(allocated.line.dash).not.toBe("solid");
    expect(ceiling.y).toEqual([100, 100]);
  });
});

describe("many ranks", () => {
  const ranks = 32;
  const series = Array.from({ length: ranks }, (_, rank) => [rank, "loss"] as [number, string]);
  const rows = Array.from({ length: ranks }, (_, rank) => [rank, 1001, 1, rank === 7 ? 99 : 1] as [number, number, number, number]);
  const store = storeOf(series, rows, ranks);

  it("become a band with the worst rank named", () => {
    const drawn = traces(store, "loss");
    expect(drawn.length).toBeLessThan(8);
    expect(drawn.some((t) => t.hovertemplate?.includes("rank 7, the worst"))).toBe(true);
  });

  it("have the worst one in the chart's key", () => {
    expect(keyOf(store, chart("loss")).map((k) => k.label)).toEqual(["mean", "worst: rank 7"]);
  });

  it("are summed up in words", () => {
    expect(inWords(store, chart("loss"))).toBe("Loss: 32 ranks from 1 to 99, the worst is rank 7");
  });

  it("never put more points on the screen than the page can take", () => {
    const names = CHARTS.filter((c) => c.shownAtFirst).flatMap((c) => c.lines(store).map((l) => l.name));
    const wide = storeOf(
      names.flatMap((name) => Array.from({ length: 16 }, (_, rank) => [rank, name] as [number, string])),
      names.flatMap((_, n) => Array.from({ length: 16 }, (_, rank) => [n * 16 + rank, 1001, 1, 1] as [number, number, number, number])),
      16,
    );
    const shown = CHARTS.filter((c) => c.shownAtFirst);
    const lines = shown.flatMap((c) => c.lines(wide)).reduce((n, line) => n + wide.named(line.name).length, 0);
    expect(pointsPerSeries(wide, shown) * lines).toBeLessThanOrEqual(MAX_POINTS_ON_SCREEN);
  });
});

describe("marks", () => {
  it("stand at their step, with their words", () => {
    const store = new RunStore();
    const mark = { rank: 0, time_s: 1002, step: 2, kind: "checkpoint", text: "step-2" };
    store.takeSnapshot(snapshot([], { marks: [mark] }), points());
    const { layout } = drawing(store, chart("loss"), "step", THEME, 200, 500) as {
      layout: { annotations: { x: number; hovertext: string }[] };
    };
    expect(layout.annotations).toMatchObject([{ x: 2, hovertext: "checkpoint: step-2" }]);
  });

  it("of a step that was left out look like something that went wrong", () => {
    const store = new RunStore();
    const mark = { rank: 1, time_s: 1002, step: 2, kind: "nonfinite", text: "loss is nan on rank 1 at step 2" };
    store.takeSnapshot(snapshot([], { marks: [mark] }), points());
    const { layout } = drawing(store, chart("loss"), "step", THEME, 200, 500) as {
      layout: { annotations: object[] };
    };
    expect(layout.annotations).toMatchObject([{ text: "▲", font: { color: THEME.danger } }]);
  });
});
