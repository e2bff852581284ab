import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { TextLink, type TextMessage, type TextModel, type TextPageMessage } from "../src/text";

const PAGE =
  '<div class="nbgpu-text"><div class="nbgpu-whose" hidden><label><input type="radio" name="n" value="1"></label></div>' +
  '<div class="nbgpu-lines"><div class="nbgpu-said"><b>[0]</b><pre>one</pre></div></div><div class="nbgpu-rows"></div></div>';

class Kernel implements TextModel {
  readonly told: TextPageMessage[] = [];
  widget_manager: unknown = undefined;
  private heard: ((message: TextMessage) => void) | undefined;

  get(name: "key" | "slot"): unknown {
    return name === "slot" ? "the slot" : "a key";
  }
  send(content: TextPageMessage): void {
    this.told.push(content);
  }
  on(_: string, callback: (message: TextMessage) => void): void {
    this.heard = callback;
  }
  off(): void {
    this.heard = undefined;
  }
  say(message: TextMessage): void {
    this.heard?.(message);
  }
}

function more(change: Partial<Extract<TextMessage, { type: "more" }>>): TextMessage {
  return { type: "more", tail: "", html: "", rows: "", differs: false, ...change };
}

let kernel: Kernel;
let link: TextLink;
let root: HTMLElement;

beforeEach(() => {
  vi.useFakeTimers();
  kernel = new Kernel();
  link = new TextLink(kernel);
  root = document.createElement("div");
});

afterEach(() => {
  link.close();
  vi.useRealTimers();
});

test("it says that it is ready, and shows what it is told", () => {
  link.show(root);
  expect(kernel.told).toEqual([{ type: "ready" }]);
  kernel.say({ type: "snapshot", html: PAGE });
  kernel.say(more({ tail: "\ntwo", rows: "<i>10%</i>" }));
  kernel.say(more({ html: '<div class="nbgpu-said"><pre>three</pre></div>', rows: "<i>20%</i>", differs: true }));
  expect([...root.querySelectorAll("pre")].map((pre) => pre.textContent)).toEqual(["one\ntwo", "three"]);
  expect(root.querySelector(".nbgpu-rows")?.textContent).toBe("20%");
  expect(root.querySelector(".nbgpu-whose")?.hasAttribute("hidden")).toBe(false);
});

test("it says that it is ready until the kernel answers, whose main thread may be in another cell", () => {
  vi.advanceTimersByTime(300);
  expect(kernel.told).toEqual([{ type: "ready" }, { type: "ready" }]);
  kernel.say({ type: "snapshot", html: PAGE });
  vi.advanceTimersByTime(60_000);
  expect(kernel.told.length).toBe(2);
});

test("a second view has all, and what comes before the first snapshot is in that", () => {
  kernel.say(more({ tail: "\nlost" }));
  kernel.say({ type: "snapshot", html: PAGE });
  for (let i = 0; i < 50; i++) kernel.say(more({ rows: `<i>${i}</i>` }));
  kernel.say(more({ tail: "\ntwo", rows: "<i>last</i>" }));
  link.show(root);
  expect(root.querySelector("pre")?.textContent).toBe("one\ntwo");
  expect(root.querySelector(".nbgpu-rows")?.textContent).toBe("last");
});

test("the kernel is told whose text is seen", () => {
  link.show(root);
  kernel.say({ type: "snapshot", html: PAGE });
  const radio = root.querySelector("input")!;
  radio.checked = true;
  radio.dispatchEvent(new Event("change", { bubbles: true }));
  expect(kernel.told.at(-1)).toEqual({ type: "chosen", value: "1" });
});

test("at the end a reloaded page puts the text into the notebook itself, and takes dead buttons away", () => {
  const outputs = [
    { metadata: { nbgpu: { slot: "the slot", final: "" } } },
    { metadata: { nbgpu: { button: true } } },
    { metadata: {} },
  ];
  const put: [number, unknown][] = [];
  const list = {
    length: outputs.length,
    get: (index: number) => outputs[index],
    set: (index: number, output: unknown) => put.push([index, output]),
  };
  kernel.widget_manager = { context: { model: { cells: [{ outputs: list }] } } };
  kernel.say({ type: "end" });
  vi.advanceTimersByTime(1000);
  expect(kernel.told.at(-1)).toEqual({ type: "bundle" });
  kernel.say({ type: "bundle", data: { "text/plain": "all" }, metadata: {} });
  expect(put.map(([index]) => index)).toEqual([0, 1]);
  expect(kernel.told.at(-1)).toEqual({ type: "stored" });
});

test("where the text is in the notebook, or there is no place for it, the widget can go", () => {
  kernel.say({ type: "end" });
  vi.advanceTimersByTime(1000);
  expect(kernel.told.at(-1)).toEqual({ type: "stored" });
});
