// Decides when to ask the server: each second while the sidebar is seen, now and then while there is a cluster, and
// otherwise only after a hint that there may be one.
import type { Overview } from "./overview";

export const SEEN_PERIOD_MS = 1000;
export const CLUSTER_PERIOD_MS = 3000;
export const AFTER_FAILURE_MS = 5000;
export const HINTS_APART_MS = 2000;

export class Watch {
  overview: Overview | null = null;
  /** Why the last answer did not come; empty where it did. */
  problem = "";

  private seen = false;
  private pageIsVisible = true;
  private asking = false;
  private askAgain = false;
  private asked_ms = -Infinity;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private readonly listeners = new Set<() => void>();

  constructor(private readonly ask: (withDevices: boolean) => Promise<Overview>) {}

  onChange(listener: () => void): void {
    this.listeners.add(listener);
  }

  setSeen(seen: boolean): void {
    if (seen === this.seen) return;
    this.seen = seen;
    if (seen) this.nudge();
    else this.plan();
  }

  setPageVisible(visible: boolean): void {
    if (visible === this.pageIsVisible) return;
    this.pageIsVisible = visible;
    if (visible && this.period() !== null) this.nudge();
    else this.plan();
  }

  /** Something has happened, such as a cell that has ended: ask now. */
  nudge(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
    void this.askNow();
  }

  /** There may be a cluster by now. Asks soon, where nothing is asked anyway. */
  hint(): void {
    if (this.period() !== null || !this.pageIsVisible || this.asking || this.timer !== null) return;
    const wait_ms = Math.max(0, this.asked_ms + HINTS_APART_MS - Date.now());
    this.timer = setTimeout(() => void this.askNow(), wait_ms);
  }

  /** The time until the next question; null while nothing has to be asked. */
  period(): number | null {
    if (!this.pageIsVisible) return null;
    if (this.seen) return this.problem ? AFTER_FAILURE_MS : SEEN_PERIOD_MS;
    if (this.overview?.clusters.length) return this.problem ? AFTER_FAILURE_MS : CLUSTER_PERIOD_MS;
    return null;
  }

  private async askNow(): Promise<void> {
    if (this.asking) {
      this.askAgain = true;
      return;
    }
    this.timer = null;
    this.asking = true;
    this.asked_ms = Date.now();
    try {
      const now = await this.ask(this.seen);
      // A question from before the sidebar was opened brings no devices: those from before are shown until then.
      now.devices ??= this.overview?.devices ?? null;
      this.overview = now;
      this.problem = "";
    } catch (error) {
      this.problem = error instanceof Error ? error.message : String(error);
    } finally {
      this.asking = false;
    }
    for (const listener of this.listeners) listener();
    if (this.askAgain) {
      this.askAgain = false;
      void this.askNow();
    } else this.plan();
  }

  private plan(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
    const period = this.period();
    if (period !== null && !this.asking) this.timer = setTimeout(() => void this.askNow(), period);
  }
}
