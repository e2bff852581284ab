// Sentences about clusters and runs.
import type { Cluster, Progress } from "./overview";

/** '12 s', '3 min', '2 h 5 min', '4 d'. */
export function duration(seconds: number): string {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d`;
}

export function countOfRanks(count: number): string {
  return `${count} ${count === 1 ? "rank" : "ranks"}`;
}

/** 'step 120 of 400'; the whole is not known before the data are, where the length is given in epochs. */
function stepsInWords(progress: Progress): string {
  return progress.total_steps ? `step ${progress.step} of ${progress.total_steps}` : `step ${progress.step}`;
}

/** 'step 120 of 400, epoch 2 of 5, 3 min left'. */
export function progressInWords(progress: Progress): string {
  const parts = [stepsInWords(progress)];
  if (progress.num_epochs > 1) parts.push(`epoch ${progress.epoch} of ${progress.num_epochs}`);
  else if (progress.epoch && !progress.num_epochs) parts.push(`epoch ${progress.epoch}`);
  if (progress.eta_s !== null) parts.push(`${duration(progress.eta_s)} left`);
  return parts.join(", ");
}

/** What the status bar says of the current notebook's cluster. */
export function statusInWords(cluster: Cluster): string {
  if (cluster.state === "starting") return "cluster is starting";
  const parts = [countOfRanks(cluster.ranks.length)];
  const run = cluster.run;
  if (cluster.gone) parts.push(`${cluster.gone} gone`);
  else if (cluster.waiting) parts.push("some wait");
  if (run && !run.is_over) {
    parts.push(run.state === "training" ? "running" : run.state);
    if (run.progress) parts.push(stepsInWords(run.progress));
  } else if (cluster.ranks.some((rank) => rank.sign === "busy" || rank.sign === "waits")) {
    parts.push("in a cell");
  } else if (cluster.ranks.every((rank) => rank.sign === "idle")) {
    parts.push("idle");
  }
  return parts.join(", ");
}

const STATES: Record<Cluster["state"], string> = {
  starting: "starting",
  running: "running",
  kept: "kept, without a notebook",
  "left over": "left over: its kernel is gone",
};

export function clusterStateInWords(cluster: Cluster): string {
  return STATES[cluster.state];
}
