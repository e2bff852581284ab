// nbgpu's sign: four ranks that are connected.
import { LabIcon } from "@jupyterlab/ui-components";

const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="none" stroke="#616161" stroke-width="1.6" d="M6 6h12v12H6zM6 6l12 12M18 6L6 18" style="fill:none"/>
  <g class="jp-icon3" fill="#616161"><circle cx="6" cy="6" r="3.4"/><circle cx="18" cy="6" r="3.4"/><circle cx="6" cy="18" r="3.4"/><circle cx="18" cy="18" r="3.4"/></g>
</svg>`;

export const icon = new LabIcon({ name: "nbgpu:sign", svgstr: SVG });
