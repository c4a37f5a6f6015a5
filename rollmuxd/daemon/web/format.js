// Numbers and times as people read them. Pure.

const DASH = "–";

/** 1.24 s, 41.3 s, 3 m 12 s, 2 h 05 m, 3 d 04 h; of milliseconds. */
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return DASH;
  const sign = ms < 0 ? "−" : "";
  const s = Math.abs(ms) / 1000;
  if (s < 0.9995) return `${sign}${Math.round(s * 1000)} ms`;
  if (s < 9.995) return `${sign}${s.toFixed(2)} s`;
  if (s < 59.95) return `${sign}${s.toFixed(1)} s`;
  const whole = Math.round(s);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  if (whole < 86400) return `${sign}${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
  return `${sign}${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

export const seconds = (s) => (s === null || s === undefined ? DASH : duration(s * 1000));

/** 12,345; with so many digits behind the point. */
export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** 1 node, 2 nodes. */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export const percent = (share, digits = 0) =>
  share === null || share === undefined || Number.isNaN(share) ? DASH : `${number(share * 100, digits)} %`;

/** A time of day in the browser's zone; with milliseconds where they matter. */
export function clock(at, { millis = false } = {}) {
  const date = new Date(at);
  const two = (n) => String(n).padStart(2, "0");
  const text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return millis ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}

export function dateAndTime(at) {
  const date = new Date(at);
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at)}`;
}

/** The time that an answer tells, in milliseconds; undefined of one that has not come. */
export const millis = (iso) => (iso ? Date.parse(iso) : undefined);

const STEPS_S = [
  0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
  172800, 604800,
];

/** Round times within a span, at most so many: where an axis has its ticks. */
export function ticks(from, to, most) {
  const step = 1000 * (STEPS_S.find((s) => (to - from) / (s * 1000) <= most) ?? STEPS_S[STEPS_S.length - 1]);
  const zone = new Date(from).getTimezoneOffset() * 60000; // midnight is where people are
  const found = [];
  for (let at = Math.ceil((from - zone) / step) * step + zone; at <= to; at += step) found.push(at);
  return { step, at: found };
}

/** What stands at a tick: no more of the time than tells it from its neighbours. */
export function tickText(at, step) {
  const text = clock(at, { millis: step < 1000 });
  if (step >= 86400000) return dateAndTime(at).slice(5, 10);
  if (step >= 60000) return text.slice(0, 5);
  return step < 1000 ? text.slice(0, 10) : text;
}
