// Notices that the kernel behind a panel is gone. What the panel shows is the past from then on, and its buttons reach
// nobody.
//
// JupyterLab's widget manager carries the notebook's session as `context.sessionContext`, and ipywidgets tells its
// models when their comms die. Neither is a documented interface: every step is looked at before it is taken.

/** What of a model is used here. */
interface Source {
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  widget_manager?: unknown;
}

interface Signal<Args> {
  connect(slot: (sender: unknown, args: Args) => void): void;
  disconnect(slot: (sender: unknown, args: Args) => void): void;
}

interface Session {
  statusChanged?: Signal<string>;
  kernelChanged?: Signal<{ oldValue: unknown }>;
}

const GONE = new Set(["restarting", "autorestarting", "terminating", "dead"]);

/** Calls back when the kernel has ended, was restarted or was changed for another; returns what ends that. */
export function watchKernel(source: Source, onGone: () => void): () => void {
  const session = (source.widget_manager as { context?: { sessionContext?: Session } } | undefined)?.context
    ?.sessionContext;
  const onStatus = (_: unknown, status: string): void => {
    if (GONE.has(status)) onGone();
  };
  const onKernel = (_: unknown, change: { oldValue: unknown }): void => {
    if (change.oldValue) onGone();
  };
  // ipywidgets tells of it only where a comm was alive before.
  source.on("comm_live_update", onGone);
  session?.statusChanged?.connect(onStatus);
  session?.kernelChanged?.connect(onKernel);
  return () => {
    source.off("comm_live_update", onGone);
    session?.statusChanged?.disconnect(onStatus);
    session?.kernelChanged?.disconnect(onKernel);
  };
}

interface Manager {
  get_model?: (id: string) => Promise<{ set(name: string, value: unknown): void }>;
}

/** Disables widgets of the kernel that is gone, which nobody else would. */
export function disableWidgets(manager: unknown, ids: readonly string[]): void {
  const { get_model } = (manager ?? {}) as Manager;
  if (typeof get_model !== "function") return;
  for (const id of ids) {
    get_model.call(manager, id).then(
      (model) => model.set("disabled", true),
      () => undefined, // closed before
    );
  }
}
