// Numbers as people read them.

export function number(value: number): string {
  if (!Number.isFinite(value)) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export const GIB = 2 ** 30;

/** '1.2 of 139 GiB' */
export function memory(used_bytes: number, total_bytes: number): string {
  const used = used_bytes / GIB;
  const total = total_bytes / GIB;
  return `${used.toFixed(used < 10 ? 2 : 1)} of ${total.toFixed(total < 10 ? 1 : 0)} GiB`;
}
