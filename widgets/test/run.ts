// A small run to test with.

import lines from "../../nbgpu/ui/run/system_charts.json";
import type { Model } from "../src/link";
import type { KernelMessage, PageMessage, Points, SnapshotMessage, Status, SystemChart } from "../src/wire";

export const SYSTEM_CHARTS = lines as unknown as SystemChart[];

export function status(overrides: Partial<Status> = {}, ranks = 2): Status {
  return {
    state: "training",
    step: 3,
    total_steps: 10,
    epoch: 1,
    num_epochs: 2,
    samples_per_s: 40,
    eta: "12 s",
    time_left: "",
    pace: "All ranks keep the same pace.",
    hang: "",
    ranks: Array.from({ length: ranks }, () => ({
      state: "training" as const,
      step: 3,
      memory_bytes: 2 ** 30,
      warning: "",
    })),
    ...overrides,
  };
}

export function snapshot(series: [number, string][], overrides: Partial<SnapshotMessage> = {}, ranks = 2): SnapshotMessage {
  return {
    type: "snapshot",
    run: { id: "run-1", recipe: "autoencoder", started_s: 1000, kept: false, why_losses_differ: "" },
    ranks: Array.from({ length: ranks }, (_, rank) => ({
      color: rank === 0 ? "#0000ff" : "#00ff00",
      label: `GPU ${rank} NVIDIA H200`,
      kind: "cuda" as const,
      memory_bytes: 100 * 2 ** 30,
    })),
    series,
    marks: [],
    status: status({}, ranks),
    ...overrides,
  };
}

/** Rows of [series, time_s, step, value]. */
export function points(...rows: [number, number, number, number][]): Points {
  return {
    series: Uint16Array.from(rows, (r) => r[0]),
    time_s: Float64Array.from(rows, (r) => r[1]),
    step: Int32Array.from(rows, (r) => r[2]),
    value: Float32Array.from(rows, (r) => r[3]),
  };
}

export function buffers(p: Points): DataView[] {
  return [p.series, p.time_s, p.step, p.value].map((a) => new DataView(a.buffer as ArrayBuffer));
}

/** anywidget's model, with the kernel in the test's hand. */
export class FakeModel implements Model {
  sent: PageMessage[] = [];
  private callbacks = new Map<string, ((...args: any[]) => void)[]>();

  constructor(
    private readonly state: Record<string, unknown> = { key: "k", slot: "slot-1", show_buttons: true },
    public widget_manager?: unknown,
  ) {}

  get(name: string): unknown {
    return this.state[name];
  }

  send(content: PageMessage): void {
    this.sent.push(content);
  }

  on(event: string, callback: (...args: any[]) => void): void {
    this.callbacks.set(event, [...(this.callbacks.get(event) ?? []), callback]);
  }

  off(event: string, callback: (...args: any[]) => void): void {
    this.callbacks.set(event, (this.callbacks.get(event) ?? []).filter((c) => c !== callback));
  }

  tell(event: string): void {
    for (const callback of this.callbacks.get(event) ?? []) callback();
  }

  kernelSays(message: KernelMessage, data: ArrayBufferView[] = []): void {
    for (const callback of this.callbacks.get("msg:custom") ?? []) callback(message, data);
  }
}
