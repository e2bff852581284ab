// Which cells JupyterLab marks as going to the ranks.
import { describe, expect, it } from "vitest";
import { distributedCell, namedRanks } from "../labextension/src/distributed_cell";
import { edgeOf, RANK_COLORS } from "../labextension/src/palette";

describe("a distributed cell", () => {
  it.each([
    ["%%distributed\nx = 1", { begin: 0, ranks: null }],
    ["%%distributed", { begin: 0, ranks: null }],
    ["%%distributed --ranks 1\nx", { begin: 0, ranks: [1] }],
    ["%%distributed --full --ranks=0,2-4 --into y\nx", { begin: 0, ranks: [0, 2, 3, 4] }],
    ["%%distributed --ranks 3-\nx", { begin: 0, ranks: null }],
    ["%%distributed --ranks 3-1\nx", { begin: 0, ranks: null }],
    ["%%distributed --ranks 0-99999999\nx", { begin: 0, ranks: null }],
    ["# a comment\n\n%%time\n%%distributed\nx", { begin: 20, ranks: null }],
  ])("%j", (source, expected) => {
    expect(distributedCell(source)).toEqual(expected);
  });

  it.each(["", "x = 1", "%%distributedly\nx", "x\n%%distributed\n", "%distributed x", "'%%distributed'", "%%bash\n%%distributed"])(
    "is not %j",
    (source) => {
      expect(distributedCell(source)).toBeNull();
    },
  );

  it("is found fast in a long cell", () => {
    const comments = "# x\n".repeat(1000);
    const begun_ms = performance.now();
    expect(distributedCell(`${comments}x = 1`)).toBeNull();
    expect(distributedCell(" ".repeat(4000))).toBeNull();
    expect(performance.now() - begun_ms).toBeLessThan(1000);
  });
});

describe("the mark", () => {
  it("names the ranks", () => {
    expect(namedRanks([1])).toBe("rank 1");
    expect(namedRanks([0, 2])).toBe("ranks 0, 2");
  });

  it("has an equal part for each rank, and repeats the eight colours", () => {
    expect(edgeOf([1])).toBe(`linear-gradient(${RANK_COLORS[1]} 0% 100%)`);
    expect(edgeOf([0, 9])).toBe(`linear-gradient(${RANK_COLORS[0]} 0% 50%, ${RANK_COLORS[1]} 50% 100%)`);
    expect(edgeOf(Array.from({ length: 16 }, (_, rank) => rank)).split("#")).toHaveLength(9);
  });
});
