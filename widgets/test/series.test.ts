import { describe, expect, it } from "vitest";
import { bandOf, CAPACITY, keepExtremes, Series, smoothed } from "../src/series";

describe("keepExtremes", () => {
  const count = (length: number) => Array.from({ length }, (_, i) => i);

  it("keeps everything where no column has more than two points", () => {
    expect(keepExtremes([1, 2, 3], [3, 1, 2], { low: 0, high: 3, count: 3 })).toEqual([0, 1, 2]);
  });

  it("keeps the lowest and the highest of every column, and both ends", () => {
    const x = count(10_000);
    const values = x.map((i) => Math.sin(i / 7) + (i % 13));
    const columns = { low: 0, high: 9999, count: 300 };
    const kept = keepExtremes(x, values, columns);
    expect(kept.length).toBeLessThanOrEqual(2 * columns.count + 2);
    expect([kept[0], kept.at(-1)]).toEqual([0, 9999]);
    expect([...kept].sort((a, b) => a - b)).toEqual(kept);
    const columnOf = (i: number) => Math.min(299, Math.floor((x[i] * 300) / 9999));
    const extremes = (indices: number[], column: number) => {
      const own = indices.filter((i) => columnOf(i) === column).map((i) => values[i]);
      return [Math.min(...own), Math.max(...own)];
    };
    for (let column = 0; column < 300; column++) expect(extremes(kept, column)).toEqual(extremes(x, column));
  });

  it("has columns of x, however unevenly the points lie in it", () => {
    const x = [...count(5000).map((i) => i / 5000), 10];
    const kept = keepExtremes(x, x.map((_, i) => (i === 4321 ? 9 : 0)), { low: 0, high: 10, count: 10 });
    expect(kept).toContain(4321);
    expect(kept.length).toBeLessThan(6);
  });

  it("keeps of what is outside of the columns what the lines go on to, and both ends", () => {
    const x = count(100);
    expect(keepExtremes(x, x, { low: 50, high: 52, count: 2 })).toEqual([0, 49, 50, 51, 52, 53, 99]);
  });

  it("does not let NaN hide an extreme", () => {
    const values = Array.from({ length: 1000 }, () => 1);
    values[0] = values[500] = NaN;
    values[501] = 50;
    expect(keepExtremes(count(1000), values, { low: 0, high: 999, count: 2 })).toContain(501);
  });
});

const SAME = ["2.6316","2.2860","2.0735","1.8278","1.5247","0.9303","0.4419"];

describe("smoothed", () => {
  it("starts at the first value and steps over NaN", () => {
    expect(smoothed([4, NaN, 4])).toEqual([4, 4, 4]);
  });

  it("is calmer than what it is made of", () => {
    const noisy = Array.from({ length: 100 }, (_, i) => (i % 2 ? 1 : -1));
    expect(Math.abs(smoothed(noisy).at(50) as number)).toBeLessThan(0.05);
    expect(Math.abs(smoothed(noisy).at(-1) as number)).toBeLessThan(0.4);
  });

  it("does not lag behind a trend, not even at its ends", () => {
    const falling = Array.from({ length: 80 }, (_, i) => 10 - i / 10);
    smoothed(falling).forEach((value, i) => expect(value).toBeCloseTo(falling[i], 9));
    const curved = Array.from({ length: 200 }, (_, i) => Math.exp(-i / 60));
    const errors = smoothed(curved).map((value, i) => Math.abs(value - curved[i]));
    expect(Math.max(...errors)).toBeLessThan(0.02);
  });

  it("gives the same numbers as the kernel's, which tests/ui/panels/test_smoothing.py has, too", () => {
    const line = smoothed([3, 1, NaN, 2, 5, -1, 0]).map((value) => value.toFixed(4));
    expect(line).toEqual(SAME);
  });
});

describe("Series", () => {
  it("stays within its capacity and keeps its extremes", () => {
    const series = new Series(0, "loss");
    for (let i = 0; i < 5 * CAPACITY; i++) series.append(i, i, i === 777 ? -9 : 1);
    expect(series.value.length).toBeLessThan(CAPACITY);
    expect(Math.min(...series.value)).toBe(-9);
    expect(series.step.length).toBe(series.value.length);
  });
});

describe("a long past", () => {
  it("is as fine at its beginning as at its end", () => {
    const series = new Series(0, "loss");
    for (let i = 0; i < 40 * CAPACITY; i++) series.append(i, i, Math.sin(i));
    const firstTenth = series.step.filter((s) => s < 4 * CAPACITY).length;
    // By count alone the first tenth would have been halved forty times.
    expect(firstTenth).toBeGreaterThan(150);
  });

  it("keeps what happened in a pause, in which no step passed", () => {
    const series = new Series(0, "memory_rss_bytes");
    for (let i = 0; i < CAPACITY - 1000; i++) series.append(i, i, 1);
    for (let i = 0; i < 2000; i++) series.append(CAPACITY + i, CAPACITY - 1001, i % 2);
    const inThePause = series.time_s.filter((t) => t >= CAPACITY).length;
    expect(inThePause).toBeGreaterThan(100);
  });

  it("forgets the steps that a run does again, and so never runs back", () => {
    const series = new Series(0, "loss");
    for (const [step, value] of [[9, 1], [10, 2], [11, 3], [12, 4], [11, 5], [12, 6]]) series.append(step, step, value);
    expect([series.step, series.value, series.time_s.length]).toEqual([[9, 10, 11, 12], [1, 2, 5, 6], 4]);
  });
});

describe("bandOf", () => {
  it("gives the lowest, mean and highest of all ranks", () => {
    const ranks = [1, 2, 6].map((value, rank) => {
      const series = new Series(rank, "loss");
      for (let step = 0; step < 4; step++) series.append(step, step, value);
      return series;
    });
    const band = bandOf(ranks, (s) => s.step, 2);
    expect(band.low).toEqual([1, 1]);
    expect(band.mean).toEqual([3, 3]);
    expect(band.high).toEqual([6, 6]);
  });

  it("counts a rank with no point in a stretch with its last value", () => {
    const often = new Series(0, "loss");
    const once = new Series(1, "loss");
    for (let step = 0; step < 4; step++) often.append(step, step, 1);
    once.append(0, 0, 3);
    expect(bandOf([often, once], (s) => s.step, 2).mean).toEqual([2, 2]);
  });
});
