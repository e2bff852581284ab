// When JupyterLab's sidebar asks the server, and when it rests.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { Cluster, Overview } from "../labextension/src/overview";
import { AFTER_FAILURE_MS, CLUSTER_PERIOD_MS, HINTS_APART_MS, SEEN_PERIOD_MS, Watch } from "../labextension/src/watch";

const overview = (clusters: number): Overview => ({
  time_s: 0,
  devices: null,
  clusters: Array.from({ length: clusters }, () => ({}) as Cluster),
  problems: [],
});

/** Lets promises that are settled call back. */
const settle = () => vi.advanceTimersByTimeAsync(0);

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("the watch", () => {
  it("asks once and then rests, where there is no cluster and nobody looks", async () => {
    const ask = vi.fn(async () => overview(0));
    const watch = new Watch(ask);
    watch.nudge();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(ask.mock.calls).toEqual([[false]]);
    expect(watch.period()).toBeNull();
  });

  it("asks for the devices each second while the sidebar is seen", async () => {
    const ask = vi.fn(async () => overview(0));
    const watch = new Watch(ask);
    watch.setSeen(true);
    await vi.advanceTimersByTimeAsync(3 * SEEN_PERIOD_MS + 1);
    expect(ask.mock.calls).toEqual([[true], [true], [true], [true]]);
    watch.setSeen(false);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(ask).toHaveBeenCalledTimes(4);
  });

  it("goes on more slowly while there is a cluster", async () => {
    const ask = vi.fn(async () => overview(1));
    const watch = new Watch(ask);
    watch.nudge();
    await vi.advanceTimersByTimeAsync(2 * CLUSTER_PERIOD_MS + 1);
    expect(ask.mock.calls).toEqual([[false], [false], [false]]);
  });

  it("rests while the page is hidden, and asks at once when it is seen again", async () => {
    const ask = vi.fn(async () => overview(1));
    const watch = new Watch(ask);
    watch.setSeen(true);
    await settle();
    watch.setPageVisible(false);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(ask).toHaveBeenCalledTimes(1);
    watch.setPageVisible(true);
    await settle();
    expect(ask).toHaveBeenCalledTimes(2);
  });

  it("keeps what it knew when an answer fails to come, says why, and asks less often", async () => {
    const ask = vi.fn(async () => overview(1));
    const watch = new Watch(ask);
    watch.setSeen(true);
    await settle();
    ask.mockRejectedValueOnce(new Error("The Jupyter server does not answer."));
    await vi.advanceTimersByTimeAsync(SEEN_PERIOD_MS);
    expect(watch.problem).toBe("The Jupyter server does not answer.");
    expect(watch.overview?.clusters).toHaveLength(1);
    await vi.advanceTimersByTimeAsync(AFTER_FAILURE_MS - 1);
    expect(ask).toHaveBeenCalledTimes(2);
    await vi.advanceTimersByTimeAsync(1);
    expect(watch.problem).toBe("");
  });

  it("has one question open at a time, and asks again for what happened meanwhile", async () => {
    let answer: (value: Overview) => void = () => {};
    const ask = vi.fn(() => new Promise<Overview>((resolve) => (answer = resolve)));
    const watch = new Watch(ask);
    const changes = vi.fn();
    watch.onChange(changes);
    watch.nudge();
    watch.nudge();
    watch.nudge();
    expect(ask).toHaveBeenCalledTimes(1);
    answer(overview(0));
    await settle();
    expect(ask).toHaveBeenCalledTimes(2);
    answer(overview(0));
    await settle();
    expect(ask).toHaveBeenCalledTimes(2);
    expect(changes).toHaveBeenCalledTimes(2);
  });

  it("asks after hints, but not for each of them, and not where it asks anyway", async () => {
    const ask = vi.fn(async () => overview(0));
    const watch = new Watch(ask);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(ask).not.toHaveBeenCalled();
    for (let hint = 0; hint < 5; hint++) watch.hint();
    await settle();
    expect(ask).toHaveBeenCalledTimes(1);
    for (let hint = 0; hint < 5; hint++) watch.hint();
    await vi.advanceTimersByTimeAsync(HINTS_APART_MS - 1);
    expect(ask).toHaveBeenCalledTimes(1);
    await vi.advanceTimersByTimeAsync(1);
    expect(ask).toHaveBeenCalledTimes(2);
    ask.mockResolvedValue(overview(1));
    await vi.advanceTimersByTimeAsync(60_000);
    expect(ask).toHaveBeenCalledTimes(2);
    watch.nudge();
    await settle();
    watch.hint();
    await vi.advanceTimersByTimeAsync(CLUSTER_PERIOD_MS - 1);
    expect(ask).toHaveBeenCalledTimes(3);
  });
});
