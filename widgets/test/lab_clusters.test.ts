// A cluster in JupyterLab's sidebar and in its status bar.
import { describe, expect, it, vi } from "vitest";
import { ClusterView } from "../labextension/src/cluster_view";
import type { Cluster, Run } from "../labextension/src/overview";
import { duration, progressInWords, statusInWords } from "../labextension/src/wording";

const rank = (number: number, sign: Cluster["ranks"][0]["sign"] = "idle", words = "idle") => ({
  rank: number,
  device: `GPU ${number}`,
  words,
  sign,
});

const cluster = (values: Partial<Cluster> = {}): Cluster => ({
  id: "3fa2b1",
  notebook: "train.ipynb",
  contents_path: "train.ipynb",
  kernel_id: "k",
  state: "running",
  started_s: 1000,
  ranks: [rank(0), rank(1)],
  waiting: "",
  gone: "",
  run: null,
  ...values,
});

const run = (values: Partial<Run> = {}): Run => ({
  name: "20260101-autoencoder-ab12",
  title: "autoencoder",
  state: "training",
  is_over: false,
  has_report: false,
  progress: { step: 120, total_steps: 400, epoch: 2, num_epochs: 5, samples_per_s: 3, eta_s: 200 },
  ...values,
});

function view(shown: Cluster) {
  const actions = {
    openNotebook: vi.fn(),
    attach: vi.fn(),
    command: vi.fn(),
    openReport: vi.fn(),
    end: vi.fn(),
  };
  const made = new ClusterView(actions);
  made.show(shown, false, 1090);
  const buttons = () =>
    [...made.root.querySelectorAll<HTMLButtonElement>(".nbgpu-lab-buttons button")].filter((each) => !each.hidden);
  return { made, actions, text: () => made.root.textContent, buttons, names: () => buttons().map((b) => b.textContent) };
}

describe("words", () => {
  it("gives times as people say them", () => {
    expect([0, 59, 60, 3599, 3600, 7500, 200_000].map(duration)).toEqual([
      "0 s",
      "59 s",
      "1 min",
      "1 h",
      "1 h",
      "2 h 5 min",
      "2 d",
    ]);
  });

  it("leaves out of the progress what is not known", () => {
    expect(progressInWords(run().progress!)).toBe("step 120 of 400, epoch 2 of 5, 3 min left");
    const begun = { ...run().progress!, epoch: 0, num_epochs: 0, eta_s: null };
    expect(progressInWords(begun)).toBe("step 120 of 400");
  });

  it("puts a cluster into one line for the status bar", () => {
    expect(statusInWords(cluster())).toBe("2 ranks, idle");
    expect(statusInWords(cluster({ run: run() }))).toBe("2 ranks, running, step 120 of 400");
    expect(statusInWords(cluster({ run: run({ state: "paused" }) }))).toBe("2 ranks, paused, step 120 of 400");
    expect(statusInWords(cluster({ run: run({ is_over: true }) }))).toBe("2 ranks, idle");
    expect(statusInWords(cluster({ ranks: [rank(0, "busy")] }))).toBe("1 rank, in a cell");
    expect(statusInWords(cluster({ gone: "rank 1" }))).toBe("2 ranks, rank 1 gone, idle");
    expect(statusInWords(cluster({ waiting: "rank 0 waits", ranks: [rank(0, "waits"), rank(1)] }))).toBe(
      "2 ranks, some wait, in a cell",
    );
    expect(statusInWords(cluster({ ranks: [rank(0, "unknown", "not known")] }))).toBe("1 rank");
    expect(statusInWords(cluster({ state: "starting" }))).toBe("cluster is starting");
  });
});

describe("the view of a cluster", () => {
  it("shows ranks, the run and its progress, and keeps its elements", () => {
    const { made, text } = view(cluster({ run: run() }));
    expect(text()).toContain("2 ranks, running, 2 min, id 3fa2b1");
    const rows = [...made.root.querySelectorAll("li")];
    expect(rows.map((row) => row.textContent)).toEqual(["rank 0GPU 0idle", "rank 1GPU 1idle"]);
    expect(made.root.querySelector("progress")!.value).toBe(120);
    made.show(cluster({ ranks: [rank(0, "waits", "waits in all_reduce, cell line 4, for 7 s"), rank(1)] }), true, 1091);
    expect(made.root.querySelectorAll("li")[0]).toBe(rows[0]);
    expect(rows[0]!.textContent).toContain("waits in all_reduce, cell line 4, for 7 s");
    expect(made.root.querySelector<HTMLElement>(".nbgpu-lab-run")!.hidden).toBe(true);
    made.show(cluster({ ranks: [rank(0)] }), true, 1091);
    expect(made.root.querySelectorAll("li")).toHaveLength(1);
  });

  it("offers what the state allows", () => {
    expect(view(cluster()).names()).toEqual(["End …"]);
    expect(view(cluster({ run: run() })).names()).toEqual(["Pause", "Stop", "End …"]);
    expect(view(cluster({ run: run({ state: "paused" }) })).names()).toEqual(["Resume", "Stop", "End …"]);
    expect(view(cluster({ run: run({ is_over: true, has_report: true }) })).names()).toEqual(["Report", "End …"]);
    expect(view(cluster({ state: "kept", run: run() })).names()).toEqual(["Attach", "Pause", "Stop", "End …"]);
    expect(view(cluster({ state: "left over" })).names()).toEqual(["Free"]);
    expect(view(cluster({ state: "starting" })).names()).toEqual([]);
    const stopping = view(cluster({ run: run({ state: "stopping" }) })).buttons();
    expect(stopping.map((button) => button.disabled)).toEqual([true, true, false]);
  });

  it("acts on the cluster as it is now", () => {
    const { made, actions, buttons } = view(cluster({ run: run() }));
    const paused = cluster({ run: run({ state: "paused" }) });
    buttons()[0]!.click();
    made.show(paused, false, 1092);
    buttons()[0]!.click();
    buttons()[1]!.click();
    expect(actions.command.mock.calls.map(([, command]) => command)).toEqual(["pause", "resume", "stop"]);
    expect(actions.command.mock.calls[2]![0]).toBe(paused);
  });

  it("says who waits and who is gone", () => {
    const { text } = view(cluster({ waiting: "rank 0 waits in barrier; rank 1 is idle", gone: "rank 1", run: run() }));
    expect(text()).toContain("Rank 0 waits in barrier; rank 1 is idle. Rank 1 gone.");
  });
});
