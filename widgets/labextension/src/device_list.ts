// The devices of the server's host, as cards.
import { element, setAttribute, setText } from "../../src/dom";
import { memory } from "../../src/format";
import type { Device } from "./overview";

class Card {
  private readonly title = element("strong", "");
  private readonly name = element("span", "nbgpu-lab-muted");
  private readonly bar = element("meter", "nbgpu-lab-meter", { min: "0", "aria-label": "Memory in use" });
  private readonly numbers = element("div", "nbgpu-lab-muted");
  private readonly holder = element("div", "");
  readonly root = element(
    "li",
    "nbgpu-lab-device",
    {},
    element("div", "nbgpu-lab-device-head", {}, this.title, this.name),
    this.bar,
    this.numbers,
    this.holder,
  );

  show(device: Device): void {
    setText(this.title, device.title);
    setText(this.name, device.name);
    this.bar.max = device.total_bytes || 1;
    this.bar.value = device.used_bytes ?? 0;
    const parts = [memory(device.used_bytes, device.total_bytes)];
    if (device.utilization_percent !== null) parts.push(`${device.utilization_percent.toFixed(0)} % busy`);
    if (device.temperature_c !== null) parts.push(`${device.temperature_c.toFixed(0)} °C`);
    if (device.power_w !== null) parts.push(`${device.power_w.toFixed(0)} W`);
    setText(this.numbers, parts.join(", "));
    setText(this.holder, device.holder);
    setAttribute(this.root, "data-state", device.state);
    setAttribute(this.root, "title", device.why);
  }
}

export class DeviceList {
  private readonly cards: Card[] = [];
  readonly root = element("ul", "nbgpu-lab-devices", { "aria-label": "Devices of this host" });

  show(devices: Device[]): void {
    while (this.cards.length > devices.length) this.cards.pop()!.root.remove();
    devices.forEach((device, at) => {
      if (!this.cards[at]) {
        this.cards[at] = new Card();
        this.root.append(this.cards[at].root);
      }
      this.cards[at].show(device);
    });
  }
}
