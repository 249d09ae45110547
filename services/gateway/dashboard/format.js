// Format numbers and times for reading. Pure.

export const NONE = "–";

export function count(value) {
  const number = Number(value) || 0;
  if (number >= 1e9) return `${(number / 1e9).toFixed(2)} G`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(2)} M`;
  if (number >= 1e5) return `${Math.round(number / 1e3)} k`;
  return number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });
}

export function milliseconds(value) {
  const ms = Number(value) || 0;
  if (ms === 0) return "0 ms";
  if (ms >= 60000) return `${(ms / 60000).toFixed(1)} min`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  if (ms >= 100) return `${Math.round(ms)} ms`;
  return `${ms.toFixed(ms < 10 ? 2 : 1)} ms`;
}

// The scheduler writes 0 when nothing came in the last minute.
export function measured(value) {
  return Number(value) > 0 ? milliseconds(value) : NONE;
}

export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : NONE;
}

export function bytes(value) {
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}
