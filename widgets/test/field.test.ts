// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { type CopyModel, show as showCopy } from "../src/copy";
import { type FieldModel, show } from "../src/field";

type Values = Record<string, unknown>;

interface Made {
  model: FieldModel & { change(values: Values): void };
  root: HTMLElement;
  sent: Values[];
  messages: unknown[];
}

function made(values: Values): Made {
  const known: Values = { kind: "text", label: "lr", value: "0.1", meaning: "rate", problem: "", empty: "", choices: [], disabled: false, name: "lr", unit: "", note: "", standard: "0.1", choice_labels: [], ...values };
  const listeners = new Map<string, () => void>();
  const sent: Values[] = [];
  const messages: unknown[] = [];
  const model = {
    get: (name: string) => known[name] as never,
    set: (name: string, value: string) => void (known[name] = value),
    save_changes: () => void sent.push({ ...known }),
    send: (content: unknown) => void messages.push(content),
    on: (event: string, callback: () => void) => void listeners.set(event, callback),
    off: (event: string) => void listeners.delete(event),
    change(changed: Values) {
      for (const [name, value] of Object.entries(changed)) {
        known[name] = value;
        listeners.get(`change:${name}`)?.();
      }
    },
  };
  const root = document.createElement("div");
  document.body.replaceChildren(root);
  show(model, root);
  return { model, root, sent, messages };
}

describe("a field", () => {
  test("sends what was typed just as it was typed, and keeps it beside what is wrong with it", () => {
    const { model, root, sent, messages } = made({});
    const input = root.querySelector("input")!;
    input.value = "0,001";
    input.dispatchEvent(new Event("change"));
    expect(sent.at(-1)?.value).toBe("0,001");
    // Beside the state, which the page may keep back while a press of a button goes ahead.
    expect(messages).toEqual([{ type: "take", value: "0,001" }]);
    model.change({ problem: "no number" });
    expect(input.value).toBe("0,001");
    expect(input.getAttribute("aria-invalid")).toBe("true");
    const described = input.getAttribute("aria-describedby")!.split(" ");
    const texts = described.map((id) => document.getElementById(id)?.textContent).filter(Boolean);
    expect(texts).toEqual(["no number", "rate"]);
    model.change({ problem: "" });
    // A screen reader reads an alert that appears; an empty one would be in its list all the time.
    expect(root.querySelector("[role=alert]")).toBeNull();
    expect(input.hasAttribute("aria-invalid")).toBe(false);
  });

  test("takes its help away when it is scrolled out of sight, and keeps it while it can be seen", () => {
    const { root } = made({});
    const input = root.querySelector("input")!;
    const help = root.querySelector<HTMLElement>(".nbgpu-help")!;
    help.showPopover = help.hidePopover = () => {};
    const field = help.parentElement!;
    const rect = (top: number, bottom: number): DOMRect => new DOMRect(0, top, 100, bottom - top);
    const pane = document.body.appendChild(document.createElement("div"));
    pane.getBoundingClientRect = () => rect(100, 500);
    let top = 200;
    field.getBoundingClientRect = () => rect(top, top + 20);
    input.focus();
    for (const [to, isShown] of [[110, true], [60, false]] as const) {
      top = to;
      pane.dispatchEvent(new Event("scroll"));
      expect(help.classList.contains("nbgpu-shown")).toBe(isShown);
    }
  });

  test("is named by its label, in all three kinds", () => {
    for (const kind of ["text", "choice", "switch"]) {
      const { root } = made({ kind, choices: ["0.1", "0.2"] });
      const control = root.querySelector<HTMLInputElement | HTMLSelectElement>("input, select")!;
      expect([...(control.labels ?? [])].map((label) => label.textContent)).toEqual(["lr"]);
    }
  });

  test("gives a choice and a tick as text", () => {
    const choice = made({ kind: "choice", value: "a", choices: ["", "a", "b"], empty: "left out" });
    const select = choice.root.querySelector("select")!;
    expect([...select.options].map((option) => option.text)).toEqual(["left out", "a", "b"]);
    select.value = "";
    select.dispatchEvent(new Event("change"));
    expect(choice.sent.at(-1)?.value).toBe("");
    const tick = made({ kind: "switch", value: "False" });
    const box = tick.root.querySelector("input")!;
    box.click();
    expect(tick.sent.at(-1)?.value).toBe("True");
  });
});

describe("while somebody types", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  function type(input: HTMLInputElement, text: string): void {
    input.value = text;
    input.dispatchEvent(new Event("input"));
  }

  test("what is typed is a draft after a pause, and the value when it is done", () => {
    const { root, sent } = made({ draft: "0.1" });
    const input = root.querySelector("input")!;
    type(input, "0.0");
    vi.advanceTimersByTime(100);
    type(input, "0.00");
    vi.advanceTimersByTime(200);
    expect(sent).toEqual([]);
    vi.advanceTimersByTime(100);
    expect(sent.map(({ draft, value }) => [draft, value])).toEqual([["0.00", "0.1"]]);
    type(input, "0.002");
    input.dispatchEvent(new Event("change"));
    vi.advanceTimersByTime(1000);
    expect(sent.map(({ draft, value }) => [draft, value]).slice(1)).toEqual([["0.002", "0.002"]]);
  });

  test("an answer of the kernel does not take away what was typed since", () => {
    const { model, root } = made({});
    const input = root.querySelector("input")!;
    type(input, "0.00");
    model.change({ problem: "above 0" });
    expect(input.value).toBe("0.00");
    expect(root.querySelector("[role=alert]")?.textContent).toBe("above 0");
  });

  test("what is typed and taken back is judged as well", () => {
    const { root, sent } = made({});
    const input = root.querySelector("input")!;
    type(input, "x");
    vi.advanceTimersByTime(300);
    type(input, "0.1");
    // The browser sees no change then.
    input.dispatchEvent(new Event("blur"));
    expect(sent.map(({ draft }) => draft)).toEqual(["x", "0.1"]);
  });
});

describe("a changed field", () => {
  test("is marked by more than a colour, and asks to be reset", () => {
    const { model, root, messages } = made({ changed: true, value: "0.5" });
    const reset = root.querySelector<HTMLButtonElement>(".nbgpu-reset")!;
    expect(reset.hidden).toBe(false);
    expect(reset.getAttribute("aria-label")).toBe("Reset lr to 0.1");
    reset.click();
    expect(messages).toEqual([{ type: "reset" }]);
    expect(document.activeElement).toBe(root.querySelector("input"));
    model.change({ changed: false, value: "0.1" });
    expect(reset.hidden).toBe(true);
  });
});

describe("the copies", () => {
  const texts: Record<string, string> = { code: "cluster.train()", command: "nbgpu train", problem: "" };
  const model: CopyModel = { get: (name) => texts[name] ?? "" };

  async function press(clipboard: Clipboard | undefined): Promise<HTMLElement> {
    const root = document.createElement("div");
    document.body.replaceChildren(root);
    showCopy(model, root, clipboard);
    root.querySelectorAll("button")[1]!.click();
    await Promise.resolve();
    await Promise.resolve();
    return root;
  }

  test("go to the clipboard", async () => {
    const written: string[] = [];
    const clipboard = { writeText: (text: string) => (written.push(text), Promise.resolve()) } as unknown as Clipboard;
    const root = await press(clipboard);
    expect(written).toEqual(["nbgpu train"]);
    expect(root.querySelector("textarea")!.hidden).toBe(true);
    expect(root.querySelector("[role=status]")!.textContent).toMatch(/^Copied/);
  });

  test("stand there selected where there is no clipboard", async () => {
    const root = await press(undefined);
    const text = root.querySelector("textarea")!;
    expect(text.hidden).toBe(false);
    expect(text.value).toBe("nbgpu train");
    expect(text.selectionEnd).toBe("nbgpu train".length);
  });
});
