import { describe, expect, it } from "vitest";
import { type ChartSpec, drawing, groupsOf, inWords, keyOf, MAX_POINTS_ON_SCREEN, pointsPerSeries } from "../src/charts";
import { RunStore } from "../src/store";
import type { Theme } from "../src/theme";
import { points, snapshot, status, SYSTEM_CHARTS } from "./run";

const GROUPS = groupsOf(SYSTEM_CHARTS);

const THEME: Theme = { text: "#111", muted: "#666", grid: "#ccc", surface: "#fff", danger: "#d00", font: "sans" };

interface Trace {
  x: number[];
  y: number[];
  name: string;
  mode: string;
  customdata?: number[];
  marker: { size: number | number[]; color: string };
  hoverinfo?: string;
  hovertemplate?: string;
  line: { color: string; width: number; dash: string };
}

function chart(id: string, store = new RunStore()): ChartSpec {
  return GROUPS.flatMap((g) => g.charts(store)).find((c) => c.id === id) as ChartSpec;
}

function idsOf(group: string, store: RunStore): string[] {
  return (GROUPS.find((g) => g.id === group)?.charts(store) ?? []).map((c) => c.id);
}

function traces(store: RunStore, id: string, axis: "step" | "time" = "step"): Trace[] {
  return drawing(store, chart(id, store), axis, THEME, 200, 500).traces as Trace[];
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

  it("draws each rank thin and bold in the rank's colour, and validation dotted in the text's", () => {
    const drawn = traces(store, "loss");
    expect(drawn.slice(2).map((t) => t.line.color)).toEqual(["#0000ff", "#00ff00", "#111"]);
    // Of the same colour, and no fainter than can be seen on a dark page.
    expect(drawn[0].line.color).toBe("rgba(0,0,255,0.85)");
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

describe("the raw values", () => {
  const store = storeOf(
    [[0, "loss"]],
    [1, 5, 3, 9].map((value, i) => [0, 1001 + i, i + 1, value] as [number, number, number, number]),
  );

  it("are named on hover, with the smoothed one beside each", () => {
    const [raw, bold] = traces(store, "loss");
    expect(raw.hovertemplate).toBe("rank 0: %{y:.4g}, smoothed %{customdata:.4g}<extra></extra>");
    expect(raw.customdata?.length).toBe(4);
    expect(raw.customdata).toEqual(bold.y);
    expect(bold.hoverinfo).toBe("skip");
    const { layout } = drawing(store, chart("loss"), "step", THEME, 200, 500) as { layout: any };
    expect(layout.xaxis.unifiedhovertitle.text).toBe("step %{x}");
  });

  it("end in a dot that the smoothed line does not hide", () => {
    const [raw] = traces(store, "loss");
    expect(raw.mode).toBe("lines+markers");
    expect(raw.marker).toEqual({ size: [0, 0, 0, 7], color: "#0000ff" });
    expect([raw.x.at(-1), raw.y.at(-1)]).toEqual([4, 9]);
  });
});

describe("a chart with nothing in it", () => {
  it("says so in place of axes over numbers that nobody measured", () => {
    const store = new RunStore();
    store.takeSnapshot(snapshot([], { status: status({ step: 0 }) }), points());
    for (const id of ["loss", "memory"]) {
      const { traces, layout } = drawing(store, chart(id), "step", THEME, 200, 500) as { traces: object[]; layout: any };
      expect(traces).toEqual([]);
      expect(layout.xaxis.visible).toBe(false);
      expect(layout.annotations.map((a: { text: string }) => a.text)).toEqual(["no step yet"]);
    }
  });
});

describe("the recipe's own numbers", () => {
  const names = ["loss", "kl_loss", "val_psnr_db", "val_loss", "lr", "lr_of_head", "recon_loss"];
  const store = storeOf(
    names.map((name) => [0, name]),
    names.map((_, i) => [i, 1001, 1, i]),
  );

  it("have an axis each, because their scales differ", () => {
    expect(idsOf("terms", store)).toEqual(["kl_loss", "recon_loss"]);
    expect(idsOf("validation", store)).toEqual(["val_psnr_db"]);
  });

  it("are named in the titles, with the unit", () => {
    const { title, unit } = chart("val_psnr_db", store);
    expect([title, unit]).toEqual(["Validation: psnr", "dB"]);
  });

  it("have the ends of an interval in the chart of their value", () => {
    const values = ["val_c_index", "val_c_index_high", "val_c_index_low", "val_ebb_low"];
    const of_interval = storeOf(
      values.map((name) => [0, name]),
      values.map((_, i) => [i, 1001, 1, i]),
    );
    expect(idsOf("validation", of_interval)).toEqual(["val_c_index", "val_ebb_low"]);
    const labels = ["validation", "95 % interval from", "95 % interval to"];
    expect(keyOf(of_interval, chart("val_c_index", of_interval)).map((k) => k.label)).toEqual(labels);
  });

  it("do not count a group's learning rate as one of them", () => {
    expect(keyOf(store, chart("lr")).map((k) => k.label)).toEqual(["lr", "head"]);
  });
});

describe("losses that are not comparable", () => {
  const series: [number, string][] = [[0, "loss"], [0, "val_loss"]];
  const store = new RunStore();
  const message = snapshot(series);
  message.run.why_losses_differ = "Patients at risk.";
  store.takeSnapshot(message, points([0, 1001, 1, 2], [1, 1001, 1, 7]));

  it("have a chart each, and the second says why", () => {
    expect(traces(store, "loss").map((t) => t.name)).toEqual(["rank 0, raw", "rank 0, smoothed"]);
    expect(idsOf("validation", store)).toEqual(["val_loss"]);
    expect(chart("val_loss", store).note?.(store)).toBe("Patients at risk.");
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
    const worst = drawn.find((t) => t.hovertemplate?.startsWith("rank 7, the worst, smoothed: "));
    expect(worst?.hoverinfo).toBe("all");
  });

  it("have the worst one in the chart's key", () => {
    expect(keyOf(store, chart("loss")).map((k) => k.label)).toEqual(["mean", "worst: rank 7"]);
  });

  it("are summed up in words", () => {
    expect(inWords(store, chart("loss"))).toBe("Loss: 32 ranks from 1 to 99, the worst is rank 7");
  });

  it("never put more points on the screen than the page can take", () => {
    const shown = GROUPS.filter((g) => g.shownAtFirst).flatMap((g) => g.charts(store));
    const names = shown.flatMap((c) => c.lines(store).map((l) => l.name));
    const wide = storeOf(
      names.flatMap((name) => Array.from({ length: 16 }, (_, rank) => [rank, name] as [number, string])),
      names.flatMap((_, n) => Array.from({ length: 16 }, (_, rank) => [n * 16 + rank, 1001, 1, 1] as [number, number, number, number])),
      16,
    );
    const lines = shown.flatMap((c) => c.lines(wide)).reduce((n, line) => n + wide.named(line.name).length, 0);
    expect(pointsPerSeries(wide, shown) * lines).toBeLessThanOrEqual(MAX_POINTS_ON_SCREEN);
  });
});

describe("marks", () => {
  it("stand at their step, with their words", () => {
    const store = new RunStore();
    const mark = { rank: 0, time_s: 1002, step: 2, kind: "checkpoint", text: "step-2" };
    store.takeSnapshot(snapshot([[0, "loss"]], { marks: [mark] }), points([0, 1001, 1, 5]));
    const { layout } = drawing(store, chart("loss"), "step", THEME, 200, 500) as {
      layout: { annotations: { x: number; hovertext: string }[] };
    };
    expect(layout.annotations).toMatchObject([{ x: 2, hovertext: "checkpoint: step-2" }]);
  });

  it("of a step that was left out look like something that went wrong", () => {
    const store = new RunStore();
    const mark = { rank: 1, time_s: 1002, step: 2, kind: "nonfinite", text: "loss is nan on rank 1 at step 2" };
    store.takeSnapshot(snapshot([[0, "loss"]], { marks: [mark] }), points([0, 1001, 1, 5]));
    const { layout } = drawing(store, chart("loss"), "step", THEME, 200, 500) as {
      layout: { annotations: object[] };
    };
    expect(layout.annotations).toMatchObject([{ text: "▲", font: { color: THEME.danger } }]);
  });
});
