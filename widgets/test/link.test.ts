import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { progressInWords } from "../src/header";
import { Link } from "../src/link";
import { buffers, FakeModel, points, snapshot, status } from "./run";

const SERIES: [number, string][] = [[0, "loss"]];

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("a link", () => {
  it("says at once that it is ready, and that it needs Plotly", () => {
    const model = new FakeModel();
    new Link(model);
    expect(model.sent).toEqual([{ type: "ready", plotly: false }]);
  });

  it("says so again until the kernel answers, whose main thread may be in a cell", () => {
    const model = new FakeModel();
    new Link(model);
    vi.advanceTimersByTime(1000);
    expect(model.sent.length).toBe(3);
    model.kernelSays(snapshot(SERIES), buffers(points([0, 1001, 1, 5])));
    vi.advanceTimersByTime(60_000);
    expect(model.sent.length).toBe(3);
  });

  it("does not fill the queue of a kernel that cannot answer during a cell", () => {
    const model = new FakeModel();
    new Link(model);
    vi.advanceTimersByTime(3_600_000);
    expect(model.sent.length).toBeLessThan(10);
  });

  it("adds what is new to what it knows", () => {
    const model = new FakeModel();
    const link = new Link(model);
    model.kernelSays(snapshot(SERIES), buffers(points([0, 1001, 1, 5])));
    const delta = { type: "delta" as const, series: [[1, "loss"]] as [number, string][], status: status({ step: 9 }) };
    model.kernelSays(delta, buffers(points([0, 1002, 2, 4], [1, 1002, 2, 6])));
    expect(link.store.named("loss").map((s) => s.value)).toEqual([[5, 4], [6]]);
    expect(link.store.status?.step).toBe(9);
  });

  it("takes the same snapshot twice with no change", () => {
    const model = new FakeModel();
    const link = new Link(model);
    for (let i = 0; i < 2; i++) model.kernelSays(snapshot(SERIES), buffers(points([0, 1001, 1, 5])));
    expect(link.store.named("loss").map((s) => s.value)).toEqual([[5]]);
  });

  it("leaves out what comes before the first snapshot, which will have it", () => {
    const model = new FakeModel();
    const link = new Link(model);
    model.kernelSays({ type: "delta" }, buffers(points([0, 1001, 1, 5])));
    expect(link.store.series).toEqual([]);
  });

  it("hears nothing any more once it is closed", () => {
    const model = new FakeModel();
    const link = new Link(model);
    link.close();
    model.kernelSays(snapshot(SERIES), buffers(points()));
    expect(link.store.run).toBeUndefined();
  });
});

/** A notebook as JupyterLab's widget manager carries it, with one output. */
function managerWith(metadata: object, model: object = {}) {
  const outputs = [{ metadata }];
  const list = {
    length: 1,
    get: (i: number) => outputs[i],
    set: (i: number, output: { metadata: object }) => (outputs[i] = output),
  };
  const save = vi.fn(async () => {});
  return { manager: { context: { model: { cells: [{ outputs: list }], ...model }, save } }, outputs, save };
}

function linkAtEnd(manager: unknown): FakeModel {
  const model = new FakeModel(undefined, manager);
  new Link(model);
  model.kernelSays(snapshot(SERIES), buffers(points()));
  model.sent = [];
  model.kernelSays({ type: "end" });
  vi.advanceTimersByTime(1000);
  return model;
}

describe("the last picture", () => {
  it("is in the notebook: the widget can go", () => {
    const { manager } = managerWith({ nbgpu: { slot: "slot-1", final: "run-1" } });
    expect(linkAtEnd(manager).sent).toEqual([{ type: "stored" }]);
  });

  it("did not arrive, as after a reload: the page asks for it and puts it there", () => {
    const { manager, outputs } = managerWith({ nbgpu: { slot: "slot-1", final: "" } });
    const model = linkAtEnd(manager);
    expect(model.sent).toEqual([{ type: "bundle" }]);
    const metadata = { nbgpu: { slot: "slot-1", final: "run-1" } };
    const data = { "text/plain": "over" };
    const elsewhere = { slot: "slot-2", data, metadata: {} };
    model.kernelSays({ type: "bundle", outputs: [elsewhere, { slot: "slot-1", data, metadata }] });
    expect(outputs).toEqual([{ output_type: "display_data", data, metadata }]);
    expect(model.sent.at(-1)).toEqual({ type: "stored" });
  });

  it("is of an earlier run in the same place: the page asks for the new one", () => {
    const { manager } = managerWith({ nbgpu: { slot: "slot-1", final: "run-0" } });
    expect(linkAtEnd(manager).sent).toEqual([{ type: "bundle" }]);
  });

  it("has no place any more: the panel stays", () => {
    const { manager } = managerWith({});
    expect(linkAtEnd(manager).sent).toEqual([]);
  });

  it("cannot be looked for in a host with no notebook: the kernel's word counts", () => {
    expect(linkAtEnd(undefined).sent).toEqual([{ type: "stored" }]);
  });
});

describe("a new panel", () => {
  it("has the notebook saved once, so that a reload finds it", () => {
    const { manager, save } = managerWith({}, { dirty: true });
    const model = new FakeModel(undefined, manager);
    new Link(model);
    for (let i = 0; i < 2; i++) model.kernelSays(snapshot(SERIES), buffers(points()));
    vi.advanceTimersByTime(1000);
    expect(save).toHaveBeenCalledOnce();
  });
});

/** A signal of JupyterLab's. */
class Signal {
  private slots: ((sender: unknown, args: any) => void)[] = [];
  connect = (slot: (sender: unknown, args: any) => void) => void this.slots.push(slot);
  disconnect = (slot: (sender: unknown, args: any) => void) => void (this.slots = this.slots.filter((s) => s !== slot));
  emit(args: unknown): void {
    for (const slot of this.slots) slot(this, args);
  }
  get size(): number {
    return this.slots.length;
  }
}

describe("a kernel that goes", () => {
  function linked(kept = false) {
    const session = { statusChanged: new Signal(), kernelChanged: new Signal() };
    const set = vi.fn();
    const manager = { context: { sessionContext: session }, get_model: async () => ({ set }) };
    const model = new FakeModel({ key: "k", slot: "s", buttons: ["one"] }, manager);
    const link = new Link(model);
    const { run } = snapshot(SERIES);
    model.kernelSays(snapshot(SERIES, { run: { ...run, kept } }), buffers(points()));
    return { session, set, model, link };
  }

  it.each(["restarting", "autorestarting", "terminating", "dead"])("is noticed when it is %s", async (status) => {
    const { session, set, link } = linked();
    const told = vi.fn();
    link.listen(told);
    session.statusChanged.emit("busy");
    expect(link.store.kernelIsGone).toBe(false);
    session.statusChanged.emit(status);
    session.statusChanged.emit(status);
    expect(link.store.kernelIsGone).toBe(true);
    expect(told.mock.calls).toEqual([["kernel"]]);
    await vi.advanceTimersByTimeAsync(0);
    expect(set.mock.calls).toEqual([["disabled", true]]);
  });

  it("is noticed when the notebook gets another one", () => {
    const { session, link } = linked();
    session.kernelChanged.emit({ oldValue: {} });
    expect(link.store.kernelIsGone).toBe(true);
  });

  it("leaves a run that is kept to be taken up again", () => {
    const { session, link } = linked(true);
    session.statusChanged.emit("restarting");
    expect(progressInWords(link.store)).toContain("the run goes on. In the new kernel %nbgpu attach connects to it again");
  });

  it("is nothing to a run that is over", () => {
    const { session, model, link } = linked();
    model.kernelSays({ type: "delta", status: status({ state: "finished" }) }, buffers(points()));
    session.statusChanged.emit("restarting");
    expect(link.store.kernelIsGone).toBe(false);
  });

  it("is not asked about any more once the link is closed", () => {
    const { session, link } = linked();
    link.close();
    expect([session.statusChanged.size, session.kernelChanged.size, vi.getTimerCount()]).toEqual([0, 0, 1]);
  });

  it("is told from one that is silent, until it is heard again", () => {
    const { model, link } = linked();
    vi.advanceTimersByTime(9000);
    expect(link.store.silent_s).toBe(0);
    vi.advanceTimersByTime(3000);
    expect(progressInWords(link.store)).toMatch(/^Nothing was heard from the kernel for 1\d s: it is busy, or gone/);
    model.kernelSays({ type: "delta", status: status() }, buffers(points()));
    expect(link.store.silent_s).toBe(0);
  });
});
