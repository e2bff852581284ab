// Numbers as people read them.

export function number(value: number): string {
  if (!Number.isFinite(value)) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

const GIB = 2 ** 30;

/** '1.2 of 139 GiB'; '? of 139 GiB' where nothing was measured yet. */
export function memory(used_bytes: number | null, total_bytes: number): string {
  const total = total_bytes / GIB;
  const used = used_bytes === null ? null : used_bytes / GIB;
  const shown = used === null ? "?" : used.toFixed(used < 10 ? 2 : 1);
  return `${shown} of ${total.toFixed(total < 10 ? 1 : 0)} GiB`;
}
