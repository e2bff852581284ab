import { describe, expect, it } from "vitest";
import { decodePoints } from "../src/wire";
import { buffers, points } from "./run";

describe("decodePoints", () => {
  it("reads what was written", () => {
    const written = points([3, 1.7e9, 12, 0.5], [4, 1.7e9 + 0.25, 13, -2]);
    expect(decodePoints(buffers(written))).toEqual(written);
  });

  it("reads buffers that start at an odd byte", () => {
    const written = points([1, 1000.5, 2, 3]);
    const moved = buffers(written).map((view) => {
      const bytes = new Uint8Array(view.byteLength + 1);
      bytes.set(new Uint8Array(view.buffer), 1);
      return new DataView(bytes.buffer, 1);
    });
    expect(decodePoints(moved)).toEqual(written);
  });

  it("says what is wrong with too few buffers", () => {
    expect(() => decodePoints([])).toThrow("4 buffers, not in 0");
  });
});
