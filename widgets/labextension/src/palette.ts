// One colour for each rank, those of nbgpu/text/palette.py; a test compares the two.

export const RANK_COLORS = [
  "#009aea",
  "#a6510a",
  "#05845e",
  "#ab86b6",
  "#7153e2",
  "#c6003f",
  "#b38f00",
  "#4b6773",
];

export function rankColor(rank: number): string {
  return RANK_COLORS[rank % RANK_COLORS.length]!;
}

/** A vertical edge with an equal part in the colour of each rank. More than eight would be too thin to see. */
export function edgeOf(ranks: number[]): string {
  const shown = ranks.slice(0, RANK_COLORS.length);
  const part = 100 / shown.length;
  const stops = shown.map((rank, at) => `${rankColor(rank)} ${at * part}% ${(at + 1) * part}%`);
  return `linear-gradient(${stops.join(", ")})`;
}
