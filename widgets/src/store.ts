// All that the page knows of one run.

import { Series } from "./series";
import type { DeltaMessage, Mark, Points, RankMeta, RunMeta, SnapshotMessage, Status } from "./wire";

export class RunStore {
  run: RunMeta | undefined;
  ranks: RankMeta[] = [];
  status: Status | undefined;
  marks: Mark[] = [];
  series: Series[] = [];
  /** What is known is the past: the kernel has ended or was restarted. */
  kernelIsGone = false;
  /** How long nothing was heard from the kernel, where that is worth saying; else 0. */
  silent_s = 0;

  /** Forgets what it knew and takes what the kernel knows: the same snapshot twice changes nothing. */
  takeSnapshot(message: SnapshotMessage, points: Points): void {
    this.run = message.run;
    this.ranks = message.ranks;
    this.status = message.status;
    this.marks = message.marks;
    this.series = message.series.map(([rank, name]) => new Series(rank, name));
    this.append(points);
  }

  /** Takes what is new. Before the first snapshot it means nothing, and the snapshot will have it. */
  takeDelta(message: DeltaMessage, points: Points): void {
    if (this.run === undefined) return;
    for (const [rank, name] of message.series ?? []) {
      this.series.push(new Series(rank, name));
    }
    this.marks.push(...(message.marks ?? []));
    this.status = message.status ?? this.status;
    this.append(points);
  }

  named(name: string): Series[] {
    return this.series
      .filter((s) => s.name === name && s.value.length > 0)
      .sort((a, b) => a.rank - b.rank);
  }

  private append(points: Points): void {
    for (let i = 0; i < points.series.length; i++) {
      this.series[points.series[i]]?.append(points.time_s[i], points.step[i], points.value[i]);
    }
  }
}
