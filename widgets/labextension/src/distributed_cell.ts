// Finds out from a cell's first lines whether it goes to the ranks, and to which.

export interface DistributedCell {
  /** The place of the line with the magic, in characters. */
  begin: number;
  /** The named ranks; null for all. */
  ranks: number[] | null;
}

/** The magic's line, below comments and the magics that time or capture what is below them. */
const CELL =
  /^(?:[^\S\n]*(?:#[^\n]*|%%(?:time|timeit|capture)\b[^\n]*)?\n)*[^\S\n]*(?=%%distributed(?<words>(?:[^\S\n][^\n]*)?)(?:\n|$))/;
const RANKS = /(?:^|\s)--ranks[\s=]+(?<list>[\d,-]+)/;
const MOST_RANKS = 1024;
/** More than any beginning that people write; the whole of a long cell is not looked at with each key. */
export const MOST_CHARACTERS = 4096;

export function distributedCell(source: string): DistributedCell | null {
  const found = CELL.exec(source);
  if (!found) return null;
  const listed = RANKS.exec(found.groups!["words"]!);
  return { begin: found[0].length, ranks: listed ? parseRanks(listed.groups!["list"]!) : null };
}

/** [0, 2, 3] of '0,2-3'; null while it is only half typed. */
function parseRanks(list: string): number[] | null {
  const ranks: number[] = [];
  for (const part of list.split(",")) {
    const bounds = /^(\d+)(?:-(\d+))?$/.exec(part);
    if (!bounds) return null;
    const first = Number(bounds[1]);
    const last = Number(bounds[2] ?? bounds[1]);
    if (last < first || last >= MOST_RANKS) return null;
    for (let rank = first; rank <= last; rank++) ranks.push(rank);
  }
  return ranks;
}

/** 'rank 1', 'ranks 0, 2'. */
export function namedRanks(ranks: number[]): string {
  return `rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}`;
}
