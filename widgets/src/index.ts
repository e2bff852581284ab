// The entry that anywidget calls: `initialize` once for each widget on a page, `render` for each of its views.

import { groupsOf } from "./charts";
import { Link, type Model } from "./link";
import { View } from "./view";
import type { SystemChart } from "./wire";

/**
 * The links of this page by panel. anywidget gives `initialize` and `render` different objects for the same
 * model, and its versions differ in whether they share this module; the page is what they surely share.
 */
const LINKS = Symbol.for("nbgpu.links");

function links(): Map<string, Link> {
  const page = globalThis as unknown as Record<symbol, Map<string, Link> | undefined>;
  return (page[LINKS] ??= new Map());
}

function initialize({ model }: { model: Model }): () => void {
  const key = String(model.get("key"));
  links().get(key)?.close();
  const link = new Link(model);
  links().set(key, link);
  return () => {
    link.close();
    if (links().get(key) === link) links().delete(key);
  };
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const link = links().get(String(model.get("key")));
  if (!link) throw new Error("the panel was rendered before it was initialized");
  const view = new View(el, link, model.get("show_buttons") === true, groupsOf(model.get("system_charts") as SystemChart[]));
  return () => view.close();
}

export default { initialize, render };
