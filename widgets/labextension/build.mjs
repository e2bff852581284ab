// Builds nbgpu/labextension, the prebuilt JupyterLab extension. The same inputs give the same bytes: CI builds
// again and compares.
import { execFileSync } from "node:child_process";
import { rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const run = (...script) => execFileSync(process.execPath, script, { cwd: here, stdio: "inherit" });

// What was compiled of a file that is gone would be bundled all the same.
rmSync(join(here, "lib"), { recursive: true, force: true });
run(join(here, "node_modules", "typescript", "bin", "tsc"));
run(join(here, "node_modules", "@jupyterlab", "builder", "lib", "build-labextension.js"), "--core-path", "core", here);
