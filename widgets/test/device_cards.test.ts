// @vitest-environment jsdom
import { describe, expect, test } from "vitest";
import { type Choice, type DeviceCard, DeviceCards } from "../src/device_cards";

const GIB = 2 ** 30;

function gpu(index: number, changed: Partial<DeviceCard> = {}): DeviceCard {
  return {
    kind: "gpu",
    uuid: `GPU-${index}`,
    title: `GPU ${index}`,
    name: "NVIDIA H100 80GB HBM3",
    group: "",
    used_bytes: 20 * GIB,
    total_bytes: 80 * GIB,
    utilization_percent: 37,
    temperature_c: 41,
    power_w: 180,
    power_limit_w: 700,
    neighbours: "NVLink to all others",
    state: "free",
    holder: "free",
    why: "",
    is_choosable: true,
    memory: "20.0 of 80.0 GiB",
    load: "37 % busy",
    heat: "41 °C, 180 of 700 W",
    ...changed,
  };
}

const CPU = gpu(0, { kind: "cpu", uuid: "", title: "CPU", name: "4 cores", heat: "", neighbours: "", holder: "no ranks of yours" });
const YOURS: Partial<DeviceCard> = { state: "yours", holder: "b.ipynb (rank 0)", why: "Your cluster of b.ipynb has it.", is_choosable: false };

function shown(): { root: HTMLElement; cards: DeviceCards; said: [string, boolean][]; boxes: () => HTMLInputElement[] } {
  const root = document.createElement("div");
  document.body.replaceChildren(root);
  const said: [string, boolean][] = [];
  const cards = new DeviceCards(root, "Devices", (uuid, isChosen) => said.push([uuid, isChosen]));
  return { root, cards, said, boxes: () => [...root.querySelectorAll("input")] };
}

const NONE: Choice = { chosen: [], isLocked: false };

function described(box: Element): string {
  const ids = box.getAttribute("aria-describedby")!.split(" ");
  return ids.map((id) => document.getElementById(id)?.textContent).join(" ").trim();
}

describe("cards of devices", () => {
  test("are compact with more than four GPUs, and say once what all would say", () => {
    const { root, cards, boxes } = shown();
    const caption = root.querySelector<HTMLElement>(".nbgpu-cards-caption")!;
    const several = (number: number): DeviceCard[] => [...Array(number).keys()].map((i) => gpu(i));
    cards.update({ devices: [...several(4), CPU], note: "" }, NONE);
    expect([root.classList.contains("nbgpu-cards-compact"), caption.textContent]).toEqual([false, ""]);
    cards.update({ devices: [...several(8), CPU], note: "" }, NONE);
    expect(root.classList.contains("nbgpu-cards-compact")).toBe(true);
    expect(caption.textContent).toBe("8 GPUs: NVIDIA H100 80GB HBM3, NVLink to all others");
    expect(boxes()).toHaveLength(8);
    cards.update({ devices: [...several(7), gpu(7, { name: "NVIDIA A100" })], note: "" }, NONE);
    expect([root.classList.contains("nbgpu-cards-compact"), caption.textContent]).toEqual([true, "8 GPUs: NVLink to all others"]);
  });

  test("say everything in words, with a bar for memory and load", () => {
    const { root, cards } = shown();
    cards.update({ devices: [gpu(3)], note: "" }, NONE);
    const card = root.querySelector(".nbgpu-card")!;
    for (const words of ["GPU 3", "NVIDIA H100 80GB HBM3", "20.0 of 80.0 GiB", "37 % busy", "41 °C, 180 of 700 W", "NVLink to all others", "free"]) {
      expect(card.textContent).toContain(words);
    }
    const fills = [...card.querySelectorAll<HTMLElement>(".nbgpu-card-fill")];
    expect(fills.map((fill) => fill.style.width)).toEqual(["25%", "37%"]);
  });

  test("show what is not reported as such, with no bar", () => {
    const { root, cards } = shown();
    cards.update({ devices: [gpu(0, { utilization_percent: null, load: "load not reported" })], note: "" }, NONE);
    const [memory, load] = [...root.querySelectorAll(".nbgpu-card-measure")];
    expect(memory!.classList.contains("nbgpu-unknown")).toBe(false);
    expect(load!.classList.contains("nbgpu-unknown")).toBe(true);
    expect(load!.textContent).toContain("load not reported");
  });

  test("change in place: the elements and the keyboard stay", () => {
    const { root, cards, boxes } = shown();
    cards.update({ devices: [gpu(0), gpu(1), CPU], note: "" }, NONE);
    const before = [...root.querySelectorAll("*")];
    boxes()[1]!.focus();
    cards.update({ devices: [gpu(0, { load: "99 % busy", utilization_percent: 99 }), gpu(1), CPU], note: "" }, NONE);
    expect([...root.querySelectorAll("*")]).toEqual(before);
    expect(document.activeElement).toBe(boxes()[1]);
    expect(root.textContent).toContain("99 % busy");
  });

  test("keep the keyboard where a GPU comes or goes", () => {
    const { cards, boxes } = shown();
    cards.update({ devices: [gpu(0), gpu(2)], note: "" }, NONE);
    const second = boxes()[1]!;
    second.focus();
    cards.update({ devices: [gpu(0), gpu(1), gpu(2)], note: "" }, NONE);
    expect(boxes().indexOf(second)).toBe(2);
    expect(document.activeElement).toBe(second);
    cards.update({ devices: [gpu(2)], note: "" }, NONE);
    expect(boxes()).toEqual([second]);
    expect(document.activeElement).toBe(second);
  });

  test("have real check boxes that are named by the card and described by its holder", () => {
    const { root, cards, said, boxes } = shown();
    cards.update({ devices: [gpu(0), gpu(1, YOURS), CPU], note: "" }, { chosen: ["GPU-0"], isLocked: false });
    expect(root.getAttribute("role")).toBe("group");
    expect(root.getAttribute("aria-label")).toBe("Devices");
    expect(boxes().map((box) => box.checked)).toEqual([true, false]);
    expect(boxes()[0]!.labels![0]!.textContent).toBe("GPU 0");
    expect(described(boxes()[1]!)).toBe("b.ipynb (rank 0) Your cluster of b.ipynb has it.");
    boxes()[0]!.click();
    expect(said).toEqual([["GPU-0", false]]);
  });

  test("cannot be changed where another cluster has the GPU or all are locked, and stay in reach of the keyboard", () => {
    const { cards, said, boxes } = shown();
    cards.update({ devices: [gpu(0), gpu(1, YOURS)], note: "" }, NONE);
    boxes()[1]!.click();
    expect(boxes()[1]!.checked).toBe(false);
    expect(boxes().map((box) => [box.disabled, box.getAttribute("aria-disabled")])).toEqual([
      [false, "false"],
      [false, "true"],
    ]);
    cards.update({ devices: [gpu(0), gpu(1, YOURS)], note: "" }, { chosen: ["GPU-0"], isLocked: true });
    boxes()[0]!.click();
    expect(boxes()[0]!.checked).toBe(true);
    expect(said).toEqual([]);
  });

  test("mark the CPU where no GPU is chosen", () => {
    const { root, cards } = shown();
    const chosen = (): string[] => [...root.querySelectorAll(".nbgpu-chosen .nbgpu-card-title")].map((title) => title.textContent!);
    cards.update({ devices: [gpu(0), CPU], note: "" }, NONE);
    expect(chosen()).toEqual(["CPU"]);
    cards.update({ devices: [gpu(0), CPU], note: "" }, { chosen: ["GPU-0"], isLocked: false });
    expect(chosen()).toEqual(["GPU 0"]);
  });

  test("put parts below their GPU, whose heat is said once", () => {
    const { root, cards } = shown();
    const group = "GPU 1 NVIDIA A100-SXM4-80GB";
    const parts = [0, 1].map((slot) => gpu(1, { uuid: `MIG-${slot}`, title: `MIG 1g.10gb device ${slot}`, group }));
    cards.update({ devices: [gpu(0), ...parts], note: "" }, NONE);
    const split = root.querySelector('[role="group"].nbgpu-split')!;
    expect(document.getElementById(split.getAttribute("aria-labelledby")!)!.textContent).toContain(group);
    expect(split.querySelectorAll(".nbgpu-card").length).toBe(2);
    expect(split.textContent!.match(/41 °C/g)).toHaveLength(1);
    cards.update({ devices: [gpu(0), gpu(1)], note: "" }, NONE);
    expect(root.querySelector(".nbgpu-split")).toBeNull();
  });

  test("without a choice have no check boxes", () => {
    const root = document.createElement("div");
    new DeviceCards(root, "Devices of this host").update({ devices: [gpu(0), CPU], note: "one GPU is hidden" });
    expect(root.querySelector("input, label, .nbgpu-chosen")).toBeNull();
    expect(root.textContent).toContain("one GPU is hidden");
  });

  test("show names as text and never as HTML, and have no live region", () => {
    const { root, cards } = shown();
    cards.update({ devices: [gpu(0, { holder: "<b>x</b>.ipynb", state: "others" })], note: "<i>n</i>" }, NONE);
    expect(root.querySelector("b, i")).toBeNull();
    expect(root.querySelector('[aria-live], [role="status"], [role="alert"]')).toBeNull();
  });
});
