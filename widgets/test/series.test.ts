import { describe, expect, it } from "vitest";
import { bandOf, CAPACITY, keepExtremes, Series, smoothed } from "../src/series";

describe("keepExtremes", () => {
  it("keeps everything that fits", () => {
    expect(keepExtremes([3, 1, 2], 4)).toEqual([0, 1, 2]);
  });

  it("keeps a single spike and a single dip among many points, and both ends", () => {
    const values = Array.from({ length: 10_000 }, (_, i) => Math.sin(i / 50));
    values[4321] = 100;
    values[8765] = -100;
    const kept = keepExtremes(values, 500);
    expect(kept.length).toBeLessThanOrEqual(500);
    expect(kept).toContain(4321);
    expect(kept).toContain(8765);
    expect(kept[0]).toBe(0);
    expect(kept.at(-1)).toBe(9999);
    expect([...kept].sort((a, b) => a - b)).toEqual(kept);
  });

  it("does not let NaN hide an extreme", () => {
    const values = Array.from({ length: 1000 }, () => 1);
    values[0] = values[500] = NaN;
    values[501] = 50;
    expect(keepExtremes(values, 4)).toContain(501);
  });
});

describe("smoothed", () => {
  it("starts at the first value and steps over NaN", () => {
    expect(smoothed([4, NaN, 4])).toEqual([4, 4, 4]);
  });

  it("is calmer than what it is made of", () => {
    const noisy = Array.from({ length: 100 }, (_, i) => (i % 2 ? 1 : -1));
    expect(Math.abs(smoothed(noisy).at(-1) as number)).toBeLessThan(0.2);
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
