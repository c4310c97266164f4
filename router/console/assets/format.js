// Formats numbers for people. Every function returns "–" for a missing value.

const MISSING = "–";
const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);

export function integer(value) {
  return isMissing(value) ? MISSING : Math.round(value).toLocaleString("en");
}

/** Formats a number with about three significant digits. */
export function short(value) {
  if (isMissing(value)) return MISSING;
  if (value >= 100_000) return `${(value / 1000).toFixed(0)} k`;
  if (value >= 100 || Number.isInteger(value)) return integer(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

export function seconds(value) {
  if (isMissing(value)) return MISSING;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  if (isMissing(value)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : MISSING;
}

/** The last part of a model's path, which is enough to tell models apart. */
export function modelName(model) {
  return model.split("/").filter(Boolean).pop() || "unnamed model";
}

export function clockTime(date) {
  return date.toLocaleTimeString("en-GB");
}
