import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import panel from "../src/index";
import { buffers, FakeModel, points, snapshot, status, SYSTEM_CHARTS } from "./run";

let seen: (visible: boolean) => void;
const react = vi.fn(async (_div: HTMLElement) => {});

beforeEach(() => {
  vi.useFakeTimers();
  react.mockClear();
  vi.stubGlobal(
    "IntersectionObserver",
    class {
      constructor(callback: (entries: { isIntersecting: boolean }[]) => void) {
        seen = (visible) => callback([{ isIntersecting: visible }]);
      }
      observe() {}
      disconnect() {}
    },
  );
  vi.stubGlobal(
    "ResizeObserver",
    class {
      observe() {}
      disconnect() {}
    },
  );
  const shelf = { api: { react, purge: vi.fn(), toImage: async () => "data:image/svg+xml,x" }, waiting: [], loading: false };
  Object.assign(globalThis, { [Symbol.for("nbgpu.plotly.4")]: shelf });
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
  document.body.replaceChildren();
});

function open(state: Record<string, unknown> = {}, manager?: unknown) {
  const model = new FakeModel(
    { key: Math.random().toString(), slot: "s", show_buttons: true, system_charts: SYSTEM_CHARTS, ...state },
    manager,
  );
  const el = document.createElement("div");
  document.body.append(el);
  const destroy = panel.initialize({ model });
  const close = panel.render({ model, el });
  return { model, el, close, destroy };
}

function button(el: HTMLElement, name: string): HTMLButtonElement {
  const found = [...el.querySelectorAll("button")].find(
    (b) => (b.getAttribute("aria-label") ?? b.textContent) === name,
  );
  if (!found) throw new Error(`no button is called ${name}`);
  return found;
}

async function say(model: FakeModel, overrides: Parameters<typeof status>[0] = {}) {
  model.kernelSays(snapshot([[0, "loss"]], { status: status(overrides) }), buffers(points([0, 1001, 1, 5])));
  await vi.advanceTimersByTimeAsync(500);
}

describe("a panel", () => {
  it("tells a screen reader of each rank in one sentence", async () => {
    const { model, el } = open();
    const now = status();
    now.ranks[1].warning = "no heartbeat for 4 s";
    await say(model, now);
    const chips = [...el.querySelectorAll('[role="listitem"]')].map((c) => c.getAttribute("aria-label"));
    expect(chips).toEqual([
      "rank 0, GPU 0 NVIDIA H200, training, step 3, memory 1.00 of 100 GiB",
      "rank 1, GPU 1 NVIDIA H200, training, step 3, memory 1.00 of 100 GiB, no heartbeat for 4 s",
    ]);
  });

  it("counts no rank that is lost with its host, and says no step of it", async () => {
    const { model, el } = open();
    const now = status();
    now.ranks[1] = { state: "lost", step: null, memory_bytes: null, warning: "its host is lost" };
    await say(model, now);
    expect(el.querySelector('[role="progressbar"]')?.getAttribute("aria-valuetext")).toContain("on 1 rank ·");
    expect(el.querySelectorAll('[role="listitem"]')[1].getAttribute("aria-label")).toBe(
      "rank 1, GPU 1 NVIDIA H200, lost, memory ? of 100 GiB, its host is lost",
    );
    expect([...el.querySelectorAll(".nbgpu-chip-step")].map((e) => e.textContent)).toEqual(["step 3", ""]);
  });

  it("claims no memory before the first sample", async () => {
    const { model, el } = open();
    const now = status();
    now.ranks[1].memory_bytes = null;
    await say(model, now);
    expect([...el.querySelectorAll(".nbgpu-chip-memory")].map((e) => e.textContent)).toEqual([
      "1.00 of 100 GiB",
      "? of 100 GiB",
    ]);
  });

  it("says a change of state once, and progress in words", async () => {
    const { model, el } = open();
    await say(model);
    expect(el.querySelector('[role="status"]')?.textContent).toBe("autoencoder is training at step 3");
    expect(el.querySelector('[role="progressbar"]')?.getAttribute("aria-valuetext")).toBe(
      "step 3 of 10 · epoch 1 of 2 · 40 samples/s on 2 ranks · 12 s left",
    );
    await say(model, { step: 4 });
    expect(el.querySelector('[role="status"]')?.textContent).toBe("autoencoder is training at step 3");
  });

  it("has the number of steps from the ranks, who know it once they have seen the data", async () => {
    const { model, el } = open();
    await say(model, { total_steps: 0 });
    expect(el.querySelector(".nbgpu-words")?.textContent).toContain("step 3 ·");
    await say(model, { step: 115, total_steps: 1200 });
    expect(el.querySelector(".nbgpu-words")?.textContent).toContain("step 115 of 1200");
    expect(el.querySelector('[role="progressbar"]')?.getAttribute("aria-valuemax")).toBe("1200");
  });

  it("gives each chart its newest values as its name", async () => {
    const { model, el } = open();
    await say(model);
    const names = [...el.querySelectorAll('[role="img"]')].map((p) => p.getAttribute("aria-label"));
    expect(names).toContain("Loss: rank 0 5");
  });

  it("pauses, resumes and stops", async () => {
    const { model, el } = open();
    await say(model);
    button(el, "Pause").click();
    expect(model.sent.at(-1)).toEqual({ type: "command", command: "pause" });
    expect(button(el, "Pausing …").disabled).toBe(true);
    await say(model, { state: "paused" });
    button(el, "Resume").click();
    expect(model.sent.at(-1)).toEqual({ type: "command", command: "resume" });
    button(el, "Stop").click();
    expect(model.sent.at(-1)).toEqual({ type: "command", command: "stop" });
    await say(model, { state: "stopped" });
    expect(button(el, "Stop").disabled).toBe(true);
  });

  it("shows why a command was refused, and lets it be given again", async () => {
    const { model, el } = open();
    await say(model);
    button(el, "Stop").click();
    model.kernelSays({ type: "refused", text: "the run is over" });
    expect(el.querySelector('[role="alert"]')?.textContent).toBe("the run is over");
    expect(button(el, "Stop").disabled).toBe(false);
  });

  it("says who waits for whom while that lasts", async () => {
    const { model, el } = open();
    const hang = "rank 0 waits in DDP backward, step 3, for 7 s; rank 1 is at read, data.py line 5";
    await say(model, { hang });
    expect(el.textContent).toContain(hang);
    await say(model, { hang: "" });
    expect(el.textContent).not.toContain("rank 0 waits");
  });

  it("says that the kernel is gone, with the run, and takes its buttons away", async () => {
    const { model, el } = open();
    await say(model, { hang: "rank 0 waits" });
    model.tell("comm_live_update");
    const words = "The kernel is gone; the run ended with it. Last heard: step 3 of 10";
    expect(el.querySelector(".nbgpu-words")?.textContent).toBe(words);
    expect(el.querySelector("[role=status]")?.textContent).toBe(words);
    expect(el.querySelector(".nbgpu-state")?.textContent).toBe("kernel gone");
    expect(el.querySelector(".nbgpu-hang")?.textContent).toBe("");
    expect(el.textContent).not.toContain("12 s left");
    expect(el.querySelector("[role=listitem]")?.getAttribute("aria-label")).toContain("not known");
    expect([button(el, "Pause").disabled, button(el, "Stop").disabled]).toEqual([true, true]);
  });

  it("says how long the hosts are there", async () => {
    const { model, el } = open();
    await say(model, { time_left: "the job ends in 9 min" });
    expect(el.querySelector(".nbgpu-words")?.textContent).toMatch(/12 s left · the job ends in 9 min$/);
  });

  it("leaves its curves in the notebook as pictures when the kernel is gone, once", async () => {
    const metadata = { nbgpu: { slot: "s-head", final: "" } };
    let output: any = { data: { "text/html": "<b>as it was</b>" }, metadata };
    const set = vi.fn((_: number, next: object) => void (output = next));
    const outputs = { length: 1, get: () => output, set };
    const save = vi.fn(async () => {});
    const { model, el } = open({}, { context: { model: { cells: [{ outputs }], dirty: true }, save } });
    await say(model);
    model.tell("comm_live_update");
    model.tell("comm_live_update");
    await vi.advanceTimersByTimeAsync(500);
    expect(set).toHaveBeenCalledOnce();
    expect(output.metadata).toEqual(metadata);
    const html = output.data["text/html"];
    expect(html).toContain("<b>as it was</b><div");
    expect(html).toContain("Last heard: step 3 of 10");
    expect(html).toContain('<p>Loss</p><img src="data:image/svg+xml,x" alt="Loss: rank 0 5">');
    expect(html).not.toContain("Throughput"); // nothing was drawn there
    expect(el.isConnected).toBe(true);
  });

  it("can leave the buttons to others", () => {
    const { el } = open({ show_buttons: false });
    expect(el.querySelector<HTMLElement>(".nbgpu-buttons")?.hidden).toBe(true);
  });

  it("does not paint what nobody sees, and catches up when it is seen", async () => {
    const { model } = open();
    seen(false);
    await say(model);
    react.mockClear();
    await say(model);
    expect(react).not.toHaveBeenCalled();
    seen(true);
    await vi.advanceTimersByTimeAsync(500);
    expect(react).toHaveBeenCalled();
  });

  it("paints at most five times a second", async () => {
    const { model } = open();
    await say(model);
    react.mockClear();
    for (let i = 0; i < 100; i++) {
      model.kernelSays({ type: "delta" }, buffers(points([0, 1001 + i, i, 5])));
      await vi.advanceTimersByTimeAsync(10);
    }
    const loss = react.mock.calls.filter(([div]) => div.closest("[data-chart=loss]"));
    expect(loss.length).toBeGreaterThan(2);
    expect(loss.length).toBeLessThanOrEqual(6);
  });

  it("paints less often where a repaint is slow", async () => {
    const { model } = open();
    await say(model);
    react.mockImplementation(() => new Promise((done) => setTimeout(done, 100)));
    react.mockClear();
    for (let i = 0; i < 60; i++) {
      model.kernelSays({ type: "delta" }, buffers(points([0, 1001 + i, i, 5])));
      await vi.advanceTimersByTimeAsync(100);
    }
    const loss = react.mock.calls.filter(([div]) => div.closest("[data-chart=loss]"));
    react.mockImplementation(async () => {});
    // Four charts of 100 ms each: the next repaint begins 1.2 s after the last one began.
    expect(loss.length).toBeLessThanOrEqual(6);
  });

  it("shows and hides charts, enlarges one, and goes over time", async () => {
    const { model, el } = open();
    await say(model);
    const card = (id: string) => el.querySelector<HTMLElement>(`[data-chart=${id}]`) as HTMLElement;
    button(el, "Memory").click();
    button(el, "Enlarge Loss").click();
    button(el, "time").click();
    await vi.advanceTimersByTimeAsync(500);
    expect(card("memory").hidden).toBe(true);
    expect(card("loss").classList.contains("nbgpu-large")).toBe(true);
    expect(button(el, "time").getAttribute("aria-pressed")).toBe("true");
    expect(button(el, "step").getAttribute("aria-pressed")).toBe("false");
  });

  it("takes a zoom back with a button that is there while it lasts", async () => {
    const { model, el } = open();
    await say(model);
    const card = el.querySelector<HTMLElement>("[data-chart=loss]") as HTMLElement;
    const plot = card.querySelector(".nbgpu-plot") as HTMLElement & { layout?: object };
    const reset = button(card, "Reset the zoom of Loss");
    expect(reset.hidden).toBe(true);
    plot.layout = { xaxis: { autorange: false, range: [2, 3] } };
    await say(model, { step: 4 });
    expect(reset.hidden).toBe(false);
    const revision = () => (react.mock.calls.filter(([div]) => div === plot).at(-1) as unknown as [unknown, unknown, any])[2].uirevision;
    const before = revision();
    reset.click();
    expect(document.activeElement).toBe(button(card, "Enlarge Loss"));
    await vi.advanceTimersByTimeAsync(500);
    // Plotly keeps a zoom for as long as this stays the same.
    expect(revision()).not.toBe(before);
  });

  it("says the epoch alone where a change of the batch size has changed how many there are", async () => {
    const { model, el } = open();
    await say(model, { epoch: 3, num_epochs: 0 });
    expect(el.querySelector(".nbgpu-words")?.textContent).toContain("step 3 of 10 · epoch 3 · 40 samples/s");
  });

  it("shows a new value of the validations as soon as there is one", async () => {
    const { model, el } = open();
    await say(model);
    expect(el.querySelector("[data-chart=val_psnr_db]")).toBe(null);
    model.kernelSays({ type: "delta", series: [[0, "val_psnr_db"]] }, buffers(points([1, 1002, 2, 20])));
    await vi.advanceTimersByTimeAsync(1500);
    const order = [...el.querySelectorAll<HTMLElement>(".nbgpu-chart")].map((c) => c.dataset["chart"]);
    expect(order.slice(0, 3)).toEqual(["loss", "val_psnr_db", "memory"]);
  });

  it("draws the same run in two places, and leaves nothing when it is closed", async () => {
    const first = open();
    const second = document.createElement("div");
    const close = panel.render({ model: first.model, el: second });
    await say(first.model);
    expect(second.querySelectorAll('[role="listitem"]').length).toBe(2);
    close();
    first.close();
    first.destroy();
    expect(first.el.children.length + second.children.length).toBe(0);
  });
});
