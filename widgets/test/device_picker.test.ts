// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { DeviceCard, Devices } from "../src/device_cards";
import { chosenOf, Picker, type PickerModel } from "../src/device_picker";

let sight: ((isIntersecting: boolean) => void) | undefined;

class Observer {
  constructor(callback: (entries: { isIntersecting: boolean }[]) => void) {
    sight = (isIntersecting) => callback([{ isIntersecting }]);
  }
  observe(): void {}
  disconnect(): void {
    sight = undefined;
  }
}

function gpu(index: number, state: DeviceCard["state"] = "free"): DeviceCard {
  return {
    kind: "gpu", uuid: `GPU-${index}`, title: `GPU ${index}`, name: "H100", group: "", used_bytes: 1, total_bytes: 80,
    utilization_percent: 0, temperature_c: 30, power_w: 70, power_limit_w: 700, neighbours: "", state, holder: state, why: "",
    is_choosable: state !== "yours" && state !== "unreadable", memory: "", load: "", heat: "",
  };
}

const CPU: DeviceCard = { ...gpu(0), kind: "cpu", uuid: "", title: "CPU" };

class Kernel implements PickerModel {
  readonly sent: string[] = [];
  private readonly heard = new Map<string, () => void>();
  private readonly values: Record<string, unknown> = { devices: {}, wanted: null, problem: "", disabled: false };

  get(name: string): never {
    return this.values[name] as never;
  }
  set(name: string, value: unknown): void {
    this.values[name] = value;
  }
  save_changes(): void {
    this.sent.push(`wanted ${JSON.stringify(this.values.wanted)}`);
  }
  send(content: { type: string }): void {
    this.sent.push(content.type);
  }
  on(event: string, callback: () => void): void {
    this.heard.set(event, callback);
  }
  off(event: string): void {
    this.heard.delete(event);
  }
  change(name: string, value: unknown): void {
    this.values[name] = value;
    this.heard.get(`change:${name}`)?.();
  }
  read(...devices: DeviceCard[]): void {
    const cards = devices.at(-1)?.kind === "cpu" ? devices : [...devices, CPU];
    this.offer(cards.filter((card) => card.uuid && card.state === "free").map((card) => card.uuid), cards);
  }
  offer(proposed: string[], cards: DeviceCard[]): void {
    this.values.devices = { devices: cards, note: "", proposed } satisfies Devices;
    this.heard.get("change:num_readings")?.();
  }
  end(): void {
    this.heard.get("comm_live_update")?.();
  }
}

let kernel: Kernel;
let root: HTMLElement;
let picker: Picker;

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("IntersectionObserver", Observer);
  kernel = new Kernel();
  root = document.createElement("div");
  document.body.replaceChildren(root);
  picker = new Picker(kernel, root);
});

afterEach(() => {
  picker.close();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

const button = (name: string): HTMLButtonElement => [...root.querySelectorAll("button")].find((each) => each.textContent === name)!;
const ticked = (): string[] => [...root.querySelectorAll("input")].filter((box) => box.checked).map((box) => box.labels![0]!.textContent!);
const summary = (): string => root.querySelector(".nbgpu-cards-summary")!.textContent!;
const problem = (): string => root.querySelector(".nbgpu-cards-problem")!.textContent!;

describe("the picker", () => {
  test("asks each second while it is in sight, and for nothing otherwise", () => {
    vi.advanceTimersByTime(10_000);
    expect(kernel.sent).toEqual([]);
    sight!(true);
    expect(kernel.sent).toEqual(["read"]);
    kernel.read(gpu(0));
    vi.advanceTimersByTime(1000);
    kernel.read(gpu(0));
    vi.advanceTimersByTime(1000);
    expect(kernel.sent).toEqual(["read", "read", "read"]);
    sight!(false);
    kernel.read(gpu(0));
    vi.advanceTimersByTime(60_000);
    expect(kernel.sent).toEqual(["read", "read", "read", "rest"]);
    sight!(true);
    expect(kernel.sent.at(-1)).toBe("read");
  });

  test("rests in a page that is hidden", () => {
    sight!(true);
    const state = vi.spyOn(document, "visibilityState", "get").mockReturnValue("hidden");
    document.dispatchEvent(new Event("visibilitychange"));
    expect(kernel.sent).toEqual(["read", "rest"]);
    state.mockRestore();
    document.dispatchEvent(new Event("visibilitychange"));
    expect(kernel.sent).toEqual(["read", "rest", "read"]);
  });

  test("says how old its numbers are where no answer comes, and asks again", () => {
    sight!(true);
    kernel.read(gpu(0));
    vi.advanceTimersByTime(6500);
    expect(problem()).toMatch(/^The kernel is busy; the numbers are those of /);
    expect(kernel.sent).toEqual(["read", "read", "read"]);
    kernel.read(gpu(0));
    expect(problem()).toBe("");
  });

  test("is over with its kernel", () => {
    sight!(true);
    kernel.read(gpu(0));
    kernel.end();
    expect(problem()).toMatch(/^The kernel is gone/);
    vi.advanceTimersByTime(60_000);
    expect(kernel.sent).toEqual(["read"]);
    root.querySelector("input")!.click();
    expect(kernel.sent).toEqual(["read"]);
  });

  test("begins with all free ones, and follows them until somebody chooses", () => {
    kernel.read(gpu(0), gpu(1, "yours"), gpu(2, "others"));
    expect(ticked()).toEqual(["GPU 0"]);
    expect(summary()).toBe("1 of 3 GPUs chosen.");
    kernel.read(gpu(0), gpu(1), gpu(2, "others"));
    expect(ticked()).toEqual(["GPU 0", "GPU 1"]);
    root.querySelectorAll("input")[2]!.click();
    expect(kernel.sent.at(-1)).toBe('wanted ["GPU-0","GPU-1","GPU-2"]');
    kernel.read(gpu(0, "yours"), gpu(1), gpu(2, "others"));
    expect(ticked()).toEqual(["GPU 1", "GPU 2"]);
    button("all free ones").click();
    expect(ticked()).toEqual(["GPU 1"]);
    button("none (CPU)").click();
    expect(ticked()).toEqual([]);
    expect(summary()).toBe("No GPU is chosen: the ranks run on the CPU.");
    expect(kernel.sent.at(-1)).toBe("wanted []");
  });

  test("shows the GPUs of the cluster in use, and cannot be changed then", () => {
    kernel.read(gpu(0), gpu(1, "this notebook"));
    kernel.change("disabled", true);
    expect(ticked()).toEqual(["GPU 1"]);
    expect(button("none (CPU)").disabled).toBe(true);
    root.querySelector("input")!.click();
    expect(ticked()).toEqual(["GPU 1"]);
    expect(kernel.sent).toEqual([]);
    kernel.read(gpu(0), gpu(1), { ...CPU, state: "this notebook" });
    expect(ticked()).toEqual([]);
    kernel.change("disabled", false);
    kernel.read(gpu(0), gpu(1));
    expect(ticked()).toEqual(["GPU 0", "GPU 1"]);
  });

  test("says what is so where there is no GPU, none is free, or nothing is known", () => {
    expect(problem()).toBe("The devices are being read …");
    kernel.read();
    expect(summary()).toBe("There is no NVIDIA GPU here: the ranks run on the CPU.");
    expect(button("all free ones").hidden).toBe(true);
    kernel.read(gpu(0, "others"));
    expect(summary()).toBe("No GPU is free: the ranks run on the CPU.");
    kernel.change("problem", "The driver has not answered");
    expect(problem()).toBe("The driver has not answered");
  });
});

test("the choice is in the driver's order and has nothing that cannot be chosen", () => {
  const devices = { devices: [gpu(0), gpu(1), gpu(2, "yours"), CPU], note: "", proposed: ["GPU-1"] };
  expect(chosenOf(devices, ["GPU-2", "GPU-1", "GPU-0", "GPU-9"])).toEqual(["GPU-0", "GPU-1"]);
  expect(chosenOf(devices, null)).toEqual(["GPU-1"]);
});

test("a person begins with the GPUs that the kernel offers, and goes on from there", () => {
  kernel.offer(["GPU-1"], [gpu(0, "others"), gpu(1), gpu(2), CPU]);
  expect(root.textContent).toContain("1 of 3 GPUs chosen.");
  const boxes = [...root.querySelectorAll<HTMLInputElement>("input[type=checkbox]")];
  expect(boxes.map((box) => box.checked)).toEqual([false, true, false]);
  boxes[2]!.click();
  expect(kernel.sent).toContain('wanted ["GPU-1","GPU-2"]');
});
