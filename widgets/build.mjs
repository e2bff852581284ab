// Builds nbgpu/static from src/ and from the locked Plotly bundle. The same inputs give the same bytes: CI
// builds again and compares.
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { constants, gunzip, gzip } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "nbgpu", "static");
const plotly = join(here, "node_modules", "plotly.js-basic-dist-min");

await mkdir(target, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: [
    { in: "src/index.ts", out: "panel" },
    { in: "src/text.ts", out: "text" },
    { in: "src/field.ts", out: "field" },
    { in: "src/device_picker.ts", out: "devices" },
    { in: "src/copy.ts", out: "copy" },
  ],
  outdir: target,
  bundle: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  minify: true,
  legalComments: "none",
  logLevel: "warning",
});
await build({
  absWorkingDir: here,
  entryPoints: [
    { in: "src/panel.css", out: "panel" },
    { in: "src/text.css", out: "text" },
    { in: "src/field.css", out: "field" },
    { in: "src/device_picker.css", out: "devices" },
  ],
  outdir: target,
  bundle: true,
  minify: true,
  charset: "utf8",
  logLevel: "warning",
});

// The packed bytes differ between versions of zlib while the unpacked ones do not: what is right is left alone.
const source = await readFile(join(plotly, "plotly-basic.min.js"));
const packedPath = join(target, "plotly-basic.min.js.gz");
if (!(await holds(packedPath, source))) {
  const packed = await promisify(gzip)(source, { level: constants.Z_BEST_COMPRESSION });
  // zlib writes no time and no file name, but the operating system's number at byte 9: 255 says 'unknown'.
  packed[9] = 255;
  await writeFile(packedPath, packed);
}
await copyFile(join(plotly, "LICENSE"), join(target, "plotly-basic.LICENSE.txt"));

async function holds(path, expected) {
  try {
    return (await promisify(gunzip)(await readFile(path))).equals(expected);
  } catch (error) {
    // Neither a missing file nor a broken one holds it.
    if (error.code === "ENOENT" || error.code?.startsWith("Z_")) return false;
    throw error;
  }
}
