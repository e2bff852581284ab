// One number of one rank over time, in bounded memory, and what is done to it before it is drawn.

/** Points that a series holds before it is thinned to half. */
export const CAPACITY = 8192;

/** Equal stretches of x, such as the columns of a chart's pixels; the last one has its end. */
export interface Columns {
  low: number;
  high: number;
  count: number;
}

/**
 * The indices of the points that a picture with these columns needs, in order: the lowest and the highest of every
 * column, the first and the last of all, and those on either side next to the columns, to which lines go on.
 * `x` ascends.
 */
export function keepExtremes(x: ArrayLike<number>, values: ArrayLike<number>, columns: Columns): number[] {
  const width = (columns.high - columns.low) / columns.count || 1;
  const columnOf = (i: number): number => {
    if (x[i] < columns.low) return -1;
    if (x[i] > columns.high) return columns.count;
    return Math.min(columns.count - 1, Math.floor((x[i] - columns.low) / width));
  };
  const kept: number[] = [];
  const keep = (i: number): void => {
    if (kept.length === 0 || i > kept[kept.length - 1]) kept.push(i);
  };
  for (let start = 0, end = 0; start < values.length; start = end) {
    const column = columnOf(start);
    let low = start;
    let high = start;
    for (end = start + 1; end < values.length && columnOf(end) === column; end++) {
      // NaN loses every comparison, and a column that begins with one must not keep it.
      if (values[end] < values[low] || Number.isNaN(values[low])) low = end;
      if (values[end] > values[high] || Number.isNaN(values[high])) high = end;
    }
    if (start === 0) keep(0);
    if (column < 0) keep(end - 1);
    else if (column === columns.count) keep(start);
    else {
      keep(Math.min(low, high));
      keep(Math.max(low, high));
    }
    if (end === values.length) keep(end - 1);
  }
  return kept;
}

/**
 * A smoothed line that does not lag behind the values: at each point a straight line is fitted to the points around it,
 * whose weights fall exponentially to both sides. `nbgpu/ui/run/smoothing.py` says why, and does the same. NaN is
 * skipped, and gets the value of the line there.
 */
export function smoothed(values: readonly number[], span = 15): number[] {
  const keep = 1 - 2 / (span + 1);
  if (!values.some(Number.isFinite)) return values.map(() => NaN);
  const past = sums(values, keep);
  const future = sums([...values].reverse(), keep);
  return values.map((value, i) => {
    const p = 5 * i;
    const f = 5 * (values.length - 1 - i);
    // The point itself is in both, and counts once. Distances into the past are negative.
    const own = Number.isFinite(value);
    const s0 = past[p] + future[f] - (own ? 1 : 0);
    const s1 = future[f + 1] - past[p + 1];
    const s2 = past[p + 2] + future[f + 2];
    const t0 = past[p + 3] + future[f + 3] - (own ? value : 0);
    const t1 = future[f + 4] - past[p + 4];
    const spread = s0 * s2 - s1 * s1;
    // Too few points, or all of them at one place, define no slope.
    return spread > 1e-9 * s0 * s0 ? (s2 * t0 - s1 * t1) / spread : t0 / s0;
  });
}

/**
 * For each point the sums over it and all before it, with the weight keep^distance: of 1, of the distance, of its
 * square, of the value, and of distance x value.
 */
function sums(values: readonly number[], keep: number): Float64Array {
  const out = new Float64Array(5 * values.length);
  let [w0, w1, w2, y0, y1] = [0, 0, 0, 0, 0];
  values.forEach((value, i) => {
    // The moments first, because each moves by the one below it.
    w2 = keep * (w2 + 2 * w1 + w0);
    w1 = keep * (w1 + w0);
    w0 *= keep;
    y1 = keep * (y1 + y0);
    y0 *= keep;
    if (Number.isFinite(value)) {
      w0 += 1;
      y0 += value;
    }
    out[5 * i] = w0;
    out[5 * i + 1] = w1;
    out[5 * i + 2] = w2;
    out[5 * i + 3] = y0;
    out[5 * i + 4] = y1;
  });
  return out;
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
    // A run that went back to a checkpoint does its later steps again: what they were before is no part of it.
    if (step < (this.step[this.step.length - 1] ?? -Infinity)) this.forgetFrom(step);
    this.time_s.push(time_s);
    this.step.push(step);
    this.value.push(value);
    if (this.value.length >= CAPACITY) {
      this.thin();
    }
  }

  get newest(): number {
    return this.value[this.value.length - 1] ?? NaN;
  }

  /** Halves it. Steps and seconds pass at different paces, and each of the two may be what the chart goes over. */
  private thin(): void {
    const kept = new Set<number>();
    for (const x of [this.step, this.time_s]) {
      const columns = { low: x[0], high: x[x.length - 1], count: CAPACITY / 8 - 1 };
      for (const i of keepExtremes(x, this.value, columns)) kept.add(i);
    }
    this.keep([...kept].sort((a, b) => a - b));
  }

  private forgetFrom(step: number): void {
    const end = this.step.findIndex((s) => s >= step);
    for (const list of [this.time_s, this.step, this.value]) list.length = end;
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
