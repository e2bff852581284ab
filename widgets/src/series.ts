// One number of one rank over time, in bounded memory, and what is done to it before it is drawn.

/** Points that a series holds before it is thinned to half. */
export const CAPACITY = 4096;

/**
 * The indices of at most `maxPoints` values (at least 4), in order: the first, the last, and the lowest and the
 * highest of equal stretches, so that no spike is lost.
 */
export function keepExtremes(values: ArrayLike<number>, maxPoints: number): number[] {
  const count = values.length;
  if (count <= maxPoints) {
    return Array.from({ length: count }, (_, i) => i);
  }
  const stretches = Math.floor((maxPoints - 2) / 2);
  const kept = new Set<number>([0]);
  for (let s = 0; s < stretches; s++) {
    const start = Math.floor((s * count) / stretches);
    const end = Math.floor(((s + 1) * count) / stretches);
    let low = start;
    let high = start;
    for (let i = start + 1; i < end; i++) {
      // NaN loses every comparison, and a stretch that begins with one must not keep it.
      if (values[i] < values[low] || Number.isNaN(values[low])) low = i;
      if (values[i] > values[high] || Number.isNaN(values[high])) high = i;
    }
    kept.add(Math.min(low, high));
    kept.add(Math.max(low, high));
  }
  kept.add(count - 1);
  return [...kept].sort((a, b) => a - b);
}

/** An exponential moving average over about `span` points, unbiased at the start; NaN is stepped over. */
export function smoothed(values: readonly number[], span = 15): number[] {
  const keep = 1 - 2 / (span + 1);
  let total = 0;
  let weight = 0;
  return values.map((value) => {
    if (Number.isFinite(value)) {
      total = keep * total + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
    }
    return weight > 0 ? total / weight : NaN;
  });
}

export class Series {
  time_s: number[] = [];
  step: number[] = [];
  value: number[] = [];

  constructor(
    readonly rank: number,
    readonly name: string,
  ) {}

  append(time_s: number, step: number, value: number): void {
    this.time_s.push(time_s);
    this.step.push(step);
    this.value.push(value);
    if (this.value.length >= CAPACITY) {
      this.keep(keepExtremes(this.value, CAPACITY / 2));
    }
  }

  get newest(): number {
    return this.value[this.value.length - 1] ?? NaN;
  }

  private keep(indices: number[]): void {
    this.time_s = indices.map((i) => this.time_s[i]);
    this.step = indices.map((i) => this.step[i]);
    this.value = indices.map((i) => this.value[i]);
  }
}

export interface Band {
  x: number[];
  low: number[];
  mean: number[];
  high: number[];
}

/**
 * Many ranks as one band: for each of `bins` stretches of x the lowest, the mean and the highest value of all.
 * A rank with no point in a stretch counts there with its last value, so that the mean is always of the same
 * ranks.
 */
export function bandOf(
  series: readonly Series[],
  xOf: (s: Series) => readonly number[],
  bins: number,
): Band {
  const xs = series.map(xOf);
  const start = Math.min(...xs.map((x) => x[0] ?? Infinity));
  const end = Math.max(...xs.map((x) => x[x.length - 1] ?? -Infinity));
  const width = (end - start) / bins || 1;
  const sum = new Float64Array(bins);
  const count = new Uint32Array(bins);
  const low = new Float64Array(bins).fill(Infinity);
  const high = new Float64Array(bins).fill(-Infinity);
  series.forEach((s, k) => {
    const x = xs[k];
    let last = NaN;
    for (let bin = 0, i = 0; bin < bins; bin++) {
      const isLast = bin === bins - 1;
      let own = 0;
      let total = 0;
      for (; i < x.length && (isLast || x[i] < start + (bin + 1) * width); i++) {
        const y = s.value[i];
        if (!Number.isFinite(y)) continue;
        own += 1;
        total += y;
        low[bin] = Math.min(low[bin], y);
        high[bin] = Math.max(high[bin], y);
      }
      if (own > 0) last = total / own;
      if (Number.isNaN(last)) continue;
      low[bin] = Math.min(low[bin], last);
      high[bin] = Math.max(high[bin], last);
      sum[bin] += last;
      count[bin] += 1;
    }
  });
  const filled = [...count.keys()].filter((bin) => count[bin] > 0);
  return {
    x: filled.map((bin) => start + (bin + 0.5) * width),
    low: filled.map((bin) => low[bin]),
    mean: filled.map((bin) => sum[bin] / count[bin]),
    high: filled.map((bin) => high[bin]),
  };
}
