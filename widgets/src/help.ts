// The help of a field: shown beside it while the pointer or the keyboard is there, in the page's top layer, because the
// outputs of a notebook cut off whatever reaches beyond them.

import { element } from "./dom";

/** So long must the pointer rest on a field: who only crosses it wants no help. */
const REST_MS = 450;
/** So long it may take from the field to its help, which stays while the pointer is on it. */
const LEAVE_MS = 200;
const GAP_PX = 6;

/** Lets `help` appear while the pointer rests on `field` or the keyboard is in it; Escape hides it. Returns what ends that. */
export function attachHelp(field: HTMLElement, mark: HTMLElement, help: HTMLElement): () => void {
  const ends = new AbortController();
  const listen = { signal: ends.signal };
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isPinned = false;

  const isShown = (): boolean => help.classList.contains("nbgpu-shown");
  const place = (): void => {
    const around = field.getBoundingClientRect();
    const own = help.getBoundingClientRect();
    const left = Math.max(GAP_PX, Math.min(around.left, window.innerWidth - own.width - GAP_PX));
    // Above, because what is wrong with the field is said below it, and the next field is there.
    const above = around.top - own.height - GAP_PX;
    const top = above >= GAP_PX ? above : Math.min(around.bottom + GAP_PX, window.innerHeight - own.height - GAP_PX);
    help.style.left = `${left}px`;
    help.style.top = `${Math.max(GAP_PX, top)}px`;
  };
  // The page's top layer is above toolbars, and what scrolls may take the field behind one.
  const follow = (scroll: Event): void => {
    const { top, bottom } =
      scroll.target instanceof Element ? scroll.target.getBoundingClientRect() : { top: 0, bottom: window.innerHeight };
    const around = field.getBoundingClientRect();
    if (around.bottom <= top || around.top >= bottom) hide();
    else place();
  };
  const show = (): void => {
    clearTimeout(timer);
    if (isShown() || !help.isConnected) return;
    // Browsers without popovers show it as a fixed box, which an output may cut off.
    help.showPopover?.();
    help.classList.add("nbgpu-shown");
    place();
    window.addEventListener("scroll", follow, { ...listen, capture: true, passive: true });
  };
  const hide = (): void => {
    clearTimeout(timer);
    isPinned = false;
    if (!isShown()) return;
    help.classList.remove("nbgpu-shown");
    if (help.isConnected) help.hidePopover?.();
    window.removeEventListener("scroll", follow, { capture: true });
  };
  const hasKeyboard = (): boolean => field.contains(document.activeElement) && document.activeElement !== mark;
  const soon = (act: () => void, delay_ms: number): void => {
    clearTimeout(timer);
    timer = setTimeout(act, delay_ms);
  };

  for (const place of [field, help]) {
    place.addEventListener("pointerenter", (e) => e.pointerType === "mouse" && soon(show, REST_MS), listen);
    place.addEventListener(
      "pointerleave",
      (e) => e.pointerType === "mouse" && !isPinned && !hasKeyboard() && soon(hide, LEAVE_MS),
      listen,
    );
  }
  field.addEventListener("focusin", (e) => e.target !== mark && show(), listen);
  field.addEventListener("focusout", (e) => !field.contains(e.relatedTarget as Node | null) && hide(), listen);
  field.addEventListener(
    "keydown",
    (e) => {
      if (e.key !== "Escape" || !isShown()) return;
      hide();
      // The notebook would leave the field for its own command mode.
      e.stopPropagation();
    },
    listen,
  );
  // For fingers, which neither rest nor focus a list without opening it.
  mark.addEventListener("click", () => (isShown() && isPinned ? hide() : ((isPinned = true), show())), listen);
  // A press elsewhere may leave the keyboard here, such as one on a tab.
  document.addEventListener("pointerdown", (e) => !field.contains(e.target as Node) && hide(), listen);
  window.addEventListener("resize", () => isShown() && place(), listen);
  return () => {
    hide();
    ends.abort();
  };
}

export function makeHelp(id: string): { help: HTMLElement; meaning: HTMLElement; code: HTMLElement } {
  const meaning = element("span", "nbgpu-meaning", { id });
  const code = element("span", "nbgpu-code");
  const help = element("div", "nbgpu-help", { popover: "manual" }, meaning, code);
  return { help, meaning, code };
}
