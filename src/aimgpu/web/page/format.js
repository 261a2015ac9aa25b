// Numbers as people read them. Unknown is shown as a dash, never as zero.

export const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** As the commands print it, to be typed back: rounded down, so that what is free is there; `up` for what is needed, granted or in use. */
export function bytes(count, { up = false } = {}) {
  if (count === null || count === undefined) return NONE;
  let unit = 0;
  while (count >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit += 1;
  return `${unit ? tenths(count, 1024 ** unit, up) : count} ${UNITS[unit]}`;
}

/** In GiB without the unit, for pairs such as "24 / 21.1 GiB". */
export function gib(count, { up = false } = {}) {
  return count === null || count === undefined ? NONE : tenths(count, 2 ** 30, up);
}

/** Down is the most that reads back as no more: of "17.7GiB" the fraction of a byte is dropped. */
function tenths(count, factor, up) {
  const found = up ? Math.ceil((count * 10) / factor) : Math.floor((count * 10 + 9) / factor);
  return String(found / 10);
}

function trim(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: digits });
}

export function number(value, digits = 0) {
  return value === null || value === undefined ? NONE : trim(value, digits);
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return trim(value, value < 10 ? 1 : 0);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${trim(seconds * 1000, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${trim(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min${seconds % 60 >= 1 && seconds < 600 ? ` ${Math.floor(seconds % 60)} s` : ""}`;
  if (seconds < 86400) return `${trim(seconds / 3600, 1)} h`;
  return `${trim(seconds / 86400, 1)} d`;
}

export function percent(part, digits = 0) {
  return part === null || part === undefined ? NONE : `${trim(part * 100, digits)} %`;
}

export function clock(epoch, withMilliseconds = false) {
  const at = new Date(epoch * 1000);
  const today = at.toDateString() === new Date().toDateString();
  const text = `${today ? "" : `${at.toLocaleDateString("en-CA")} `}${at.toTimeString().slice(0, 8)}`; // 2026-11-19 13:50:00
  return withMilliseconds ? `${text}.${String(at.getMilliseconds()).padStart(3, "0")}` : text;
}

export function ago(epoch) {
  if (!epoch) return "never";
  const seconds = Math.max(0, Date.now() / 1000 - epoch);
  return seconds < 5 ? "just now" : `${duration(Math.floor(seconds))} ago`;
}

const MEASURES = { ttft: "First token", tpot: "Each further token", latency: "Whole answer", availability: "Answered without failure", throughput: "Tokens of an answer" };

/** A promise is judged by ten requests or more: one of two that failed is no half. */
export function unjudged(targets) {
  const seen = Math.max(0, ...targets.map((one) => one.judged));
  return seen ? `too few requests yet (${seen} of 10)` : "no request yet";
}

/** Of "95% ttft <= 500ms": "First token within 500 ms, for 95 % of requests". */
export function promiseText(text) {
  const [, part, measure, sign, value] = /^([\d.]+)% (\w+)(?: (<=|>=) (.+))?$/.exec(text) ?? [];
  if (!measure) return text;
  const bound = sign ? ` ${sign === "<=" ? "within" : "at least"} ${value.replace(/(\d)([a-z])/, "$1 $2")}` : "";
  return `${MEASURES[measure] ?? measure}${bound}, for ${part} % of requests`;
}

/** As a sentence of its own: "fits there" is "Fits there." */
export function sentence(text) {
  return `${text.slice(0, 1).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

const COLOURS = 8;
const hues = new Map();

/** The same colour for the same model everywhere on the page, and after a reload as long as the same models are deployed. */
export function hue(name) {
  if (!hues.has(name)) hues.set(name, (hues.size % COLOURS) + 1);
  return `var(--m${hues.get(name)})`;
}

export function assignHues(names) {
  for (const name of names) hue(name);
}

export function shortModel(model) {
  const parts = String(model).split("/");
  return parts[parts.length - 1];
}
