// What the kernel sends, as nbgpu/ui/run/panel.py and nbgpu/ui/run/comm_protocol.py write it.

export type RunState =
  | "starting"
  | "loading packages"
  | "loading"
  | "training"
  | "validating"
  | "paused"
  | "working out the result"
  | "waiting for rank 0"
  | "stopping"
  | "stopped"
  | "finished"
  | "failed";

export const FINAL_STATES: ReadonlySet<RunState> = new Set(["stopped", "finished", "failed"]);

export interface RunMeta {
  id: string;
  recipe: string;
  started_s: number;
  /** Whether the run goes on when the kernel ends. */
  kept: boolean;
  /** Why the losses of steps and of validations are not comparable, in a sentence; else empty. */
  why_losses_differ: string;
}

export interface RankMeta {
  color: string;
  label: string;
  kind: "cuda" | "cpu";
  memory_bytes: number;
}

/** A line of nbgpu/ui/run/system_charts.json; system_charts.py says what each field means. */
export interface SystemChart {
  id: string;
  button: string;
  title: string;
  unit: string;
  lines: [name: string, style: "solid" | "dash" | "dot", label?: string][];
  worse: "more" | "less";
  divisor?: number;
  at_first?: boolean;
  in_report?: boolean;
  may_be_logarithmic?: boolean;
  top?: number;
  ceiling?: "memory_bytes";
  is_simulated?: boolean;
}

export interface RankNow {
  state: RunState | "lost";
  /** null where the rank is lost with its host. */
  step: number | null;
  /** null before the first sample. */
  memory_bytes: number | null;
  /** In words; empty where all is well. */
  warning: string;
}

export interface Status {
  state: RunState;
  step: number;
  /** 0 where it is not known yet. */
  total_steps: number;
  epoch: number;
  /** 0 until the ranks have looked at the data, and where a change of the batch size has changed it. */
  num_epochs: number;
  samples_per_s: number;
  /** In words; empty where it cannot be said. */
  eta: string;
  /** How long the hosts are there, in words; empty where no such time is known. */
  time_left: string;
  pace: string;
  /** Who waits where and who does not, while a rank waits too long; else empty. */
  hang: string;
  ranks: RankNow[];
}

export interface Mark {
  rank: number;
  time_s: number;
  step: number;
  kind: string;
  text: string;
}

export interface SnapshotMessage {
  type: "snapshot";
  run: RunMeta;
  ranks: RankMeta[];
  series: [number, string][];
  marks: Mark[];
  status: Status;
}

export interface DeltaMessage {
  type: "delta";
  series?: [number, string][];
  marks?: Mark[];
  status?: Status;
}

export interface MimeBundle {
  [mime: string]: unknown;
}

export type KernelMessage =
  | SnapshotMessage
  | DeltaMessage
  | { type: "plotly" }
  | { type: "refused"; text: string }
  | { type: "end" }
  | { type: "bundle"; outputs: { slot: string; data: MimeBundle; metadata: MimeBundle }[] };

export type PageMessage =
  | { type: "ready"; plotly: boolean }
  | { type: "command"; command: "pause" | "resume" | "stop" }
  | { type: "bundle" }
  | { type: "stored" };

export interface Points {
  series: Uint16Array;
  time_s: Float64Array;
  step: Int32Array;
  value: Float32Array;
}

/** Reads the four buffers of a message; they may start at any byte, and arrays want whole multiples. */
export function decodePoints(buffers: readonly ArrayBufferView[]): Points {
  if (buffers.length !== 4) {
    throw new Error(`points come in 4 buffers, not in ${buffers.length}`);
  }
  const [series, time_s, step, value] = buffers.map((view) =>
    view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength),
  ) as [ArrayBuffer, ArrayBuffer, ArrayBuffer, ArrayBuffer];
  return {
    series: new Uint16Array(series),
    time_s: new Float64Array(time_s),
    step: new Int32Array(step),
    value: new Float32Array(value),
  };
}
