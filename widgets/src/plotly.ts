// Plotly, once for each page. It is not part of this script: 400 kB come from the kernel the first time that
// a page needs them.

interface DrawnAxis {
  autorange?: boolean;
  range?: [number, number];
}

/** An element that Plotly draws into; what it adds is there from the first time on. */
export interface Plot extends HTMLElement {
  layout?: { xaxis?: DrawnAxis; yaxis?: DrawnAxis };
  on?(event: "plotly_relayout", callback: () => void): void;
}

export interface PlotlyApi {
  react(div: HTMLElement, traces: object[], layout: object, config: object): Promise<unknown>;
  purge(div: HTMLElement): void;
  /** The chart as a data URL. */
  toImage(div: HTMLElement, options: { format: "svg"; width: number; height: number }): Promise<string>;
}

interface Shelf {
  api?: PlotlyApi;
  waiting: ((api: PlotlyApi) => void)[];
  loading: boolean;
}

const SHELF = Symbol.for("nbgpu.plotly.4");

function shelf(): Shelf {
  const page = globalThis as unknown as Record<symbol, Shelf | undefined>;
  return (page[SHELF] ??= { waiting: [], loading: false });
}

export function loadedPlotly(): PlotlyApi | undefined {
  return shelf().api;
}

/** Calls back as soon as the page has Plotly, which may be at once. */
export function whenPlotly(callback: (api: PlotlyApi) => void): void {
  const { api, waiting } = shelf();
  if (api) callback(api);
  else waiting.push(callback);
}

/** Unpacks the gzipped bundle and runs it; harmless when the page has it already. */
export async function loadPlotly(packed: ArrayBufferView): Promise<void> {
  const place = shelf();
  if (place.api || place.loading) return;
  place.loading = true;
  const bytes = new Uint8Array(packed.byteLength);
  bytes.set(new Uint8Array(packed.buffer, packed.byteOffset, packed.byteLength));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  place.api = await evaluate(await new Response(unpacked).text());
  for (const callback of place.waiting.splice(0)) callback(place.api);
}

/**
 * Runs the bundle as a module of its own, in which `module` and `window` are ours: it finds no AMD loader, and
 * leaves the `window.Plotly` that another extension may have put there as it is.
 */
async function evaluate(source: string): Promise<PlotlyApi> {
  const wrapped = [
    "const module = { exports: {} };",
    "const define = undefined;",
    "const before = Object.getOwnPropertyDescriptor(globalThis, 'Plotly');",
    source,
    ";if (before) Object.defineProperty(globalThis, 'Plotly', before); else delete globalThis.Plotly;",
    "export default module.exports;",
  ].join("\n");
  const url = URL.createObjectURL(new Blob([wrapped], { type: "text/javascript" }));
  try {
    const module = (await import(/* @vite-ignore */ url)) as { default: PlotlyApi };
    return module.default;
  } finally {
    URL.revokeObjectURL(url);
  }
}
