// What the server says of this host and of one's clusters.
import type { Devices } from "../../src/device_cards";

export interface Rank {
  rank: number;
  device: string;
  /** What the rank does, in words that follow its name. */
  words: string;
  sign: "idle" | "busy" | "waits" | "gone" | "unknown";
}

export interface Progress {
  step: number;
  total_steps: number;
  epoch: number;
  num_epochs: number;
  samples_per_s: number;
  eta_s: number | null;
}

export interface Run {
  name: string;
  title: string;
  state: string;
  is_over: boolean;
  has_report: boolean;
  /** null until the ranks have looked at their data. */
  progress: Progress | null;
}

export interface Cluster {
  id: string;
  /** The name of the notebook's file. */
  notebook: string;
  /** The notebook's path on this server; empty where it lies outside of the server's folder. */
  contents_path: string;
  /** The kernel that has the cluster, where it is one of this server. */
  kernel_id: string;
  state: "starting" | "running" | "kept" | "left over";
  started_s: number;
  ranks: Rank[];
  /** Which ranks wait where, where they wait for long. */
  waiting: string;
  /** The ranks whose processes have ended, in words. */
  gone: string;
  run: Run | null;
}

export interface Overview {
  time_s: number;
  /** null where they were not asked for. */
  devices: Devices | null;
  clusters: Cluster[];
  problems: string[];
}
