// @vitest-environment jsdom
import { describe, expect, test } from "vitest";
import { type FieldModel, show } from "../src/field";

type Values = Record<string, unknown>;

function made(values: Values): { model: FieldModel & { change(values: Values): void }; root: HTMLElement; sent: Values[] } {
  const known: Values = { kind: "text", label: "lr", value: "0.1", meaning: "rate", problem: "", empty: "", choices: [], disabled: false, ...values };
  const listeners = new Map<string, () => void>();
  const sent: Values[] = [];
  const model = {
    get: (name: string) => known[name] as never,
    set: (name: string, value: string) => void (known[name] = value),
    save_changes: () => void sent.push({ ...known }),
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
  return { model, root, sent };
}

describe("a field", () => {
  test("sends what was typed just as it was typed, and keeps it beside what is wrong with it", () => {
    const { model, root, sent } = made({});
    const input = root.querySelector("input")!;
    input.value = "0,001";
    input.dispatchEvent(new Event("change"));
    expect(sent.at(-1)?.value).toBe("0,001");
    model.change({ problem: "no number" });
    expect(input.value).toBe("0,001");
    expect(input.getAttribute("aria-invalid")).toBe("true");
    const described = input.getAttribute("aria-describedby")!.split(" ");
    expect(described.map((id) => document.getElementById(id)?.textContent)).toEqual(["no number", "rate"]);
    model.change({ problem: "" });
    expect(input.hasAttribute("aria-invalid")).toBe(false);
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
