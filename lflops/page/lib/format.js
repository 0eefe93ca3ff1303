// Numbers as text, rounded as in the terminal. A count above 2^53 is a string of digits; null is unknown.

const UNKNOWN = "–";
const DECIMAL = ["", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q"];
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"];
const SECONDS = ["ns", "µs", "ms", "s"];

/** @type {(value: Count) => string} */
export function count(value) {
  return scaled(value, 1000, DECIMAL);
}

// A rate above the peak is marked, as in `ofPeak`.
/** @type {(value: Count, peak?: number | null) => string} */
export function rate(value, peak = null) {
  return scaled(value, 1000, DECIMAL.map((prefix) => `${prefix}FLOP/s`)) + (peak && Number(value) > peak ? " (over the peak)" : "");
}

/** @type {(value: Count) => string} */
export function bandwidth(value) {
  return scaled(value, 1000, DECIMAL.map((prefix) => `${prefix}B/s`));
}

/** @type {(value: Count) => string} */
export function size(value) {
  return scaled(value, 1024, BINARY);
}

// Three digits: more would be noise in a measured time.
/** @type {(value: number | null) => string} */
export function duration(value) {
  if (value === null) return UNKNOWN;
  if (value === 0) return "0 s";
  return Math.abs(value) >= 1 ? threeDigits(value, SECONDS.slice(-1)) : threeDigits(value * 1e9, SECONDS);
}

// A long time in minutes or hours; the smaller unit is rounded down.
/** @type {(value: number | null) => string} */
export function longDuration(value) {
  if (value === null || value < 60) return duration(value);
  const [minutes, hours] = [Math.floor(value / 60), Math.floor(value / 3600)];
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(value) % 60} s`;
}

// A rate that is computed from a time, such as samples per second.
/** @type {(value: number | null) => string} */
export function perSecond(value) {
  return value === null ? UNKNOWN : value === 0 ? "0" : threeDigits(value, DECIMAL);
}

// Uses the unit with the fewest digits before the point, but at least one.
/** @type {(value: number, symbols: string[]) => string} */
function threeDigits(value, symbols) {
  let power = 0;
  const scaled = () => value / 1000 ** power;
  while (Math.round(Math.abs(scaled())) >= 1000 && power + 1 < symbols.length) power += 1;
  const digits = [2, 1].find((each) => Number(Math.abs(scaled()).toFixed(each)) < 10 ** (3 - each)) ?? 0;
  const text = scaled().toFixed(digits);
  return `${Number(text) === 0 ? scaled().toExponential(2) : text} ${symbols[power]}`.trim();
}

/** @type {(share: number | null) => string} */
export function percent(share) {
  if (share === null) return UNKNOWN;
  if (share === 0) return "0 %";
  const rounded = (share * 100).toFixed(1);
  return Number(rounded) === 0 ? `${share > 0 ? "<" : ">-"}0.1 %` : `${rounded} %`;
}

// A share of the peak. A share above 1 is marked: the peak is too low, or a count is wrong.
/** @type {(share: number | null) => string} */
export function ofPeak(share) {
  return share !== null && share > 1 ? `${percent(share)} (over the peak)` : percent(share);
}

// A ratio as a change with its sign; a large ratio as a multiple.
/** @type {(ratio: number | null) => string} */
export function signed(ratio) {
  if (ratio !== null && ratio >= 10) return `×${count(Math.round(ratio))}`;
  const text = percent(ratio === null ? null : ratio - 1);
  return ratio !== null && ratio > 1 && /^\d/.test(text) ? `+${text}` : text;
}

// Labels of phases whose name is not their label, as in `report/words.toml`.
/** @type {Record<string, string>} */
export const PHASE_LABELS = { data: "data wait", gc: "garbage collector", transfer: "batch transfer", clip: "work on gradients", wait: "communication wait" };

/** @type {(phase: string) => string} */
export function phaseLabel(phase) {
  return PHASE_LABELS[phase] ?? phase;
}

// A name in code as words.
/** @type {(name: string) => string} */
export function words(name) {
  return name.replaceAll("_", " ");
}

// The interval of a ratio.
/** @type {(interval: { low: number | null, high: number | null }) => string} */
export function between({ low, high }) {
  return low === null ? UNKNOWN : `${signed(low)} to ${signed(high)}`;
}

// A value as a label of an axis: 0.01, 1, 100 k, 2.5 M.
/** @type {(value: number, unit?: string) => string} */
export function tick(value, unit = "") {
  const prefix = Math.min(Math.max(Math.floor(Math.log10(value) / 3 + 1e-9), 0), DECIMAL.length - 1);
  return `${Number((value / 1000 ** prefix).toPrecision(6))} ${DECIMAL[prefix]}${unit}`.trim();
}

// The value to the last digit, for a tooltip and for copying.
/** @type {(value: Value | undefined) => string} */
export function exact(value) {
  if (value === null) return "unknown";
  const text = String(value);
  return /^-?\d+$/.test(text) ? text.replace(/\B(?=(\d{3})+$)/g, ",") : text;
}

// The message of an error.
/** @type {(error: unknown) => string} */
export function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

/** @type {(value: Count, base: number, symbols: string[]) => string} */
function scaled(value, base, symbols) {
  if (value === null) return UNKNOWN;
  const isWhole = typeof value === "string" || Number.isSafeInteger(value);
  return isWhole ? wholeNumber(BigInt(value), BigInt(base), symbols) : fraction(Number(value), base, symbols);
}

// By integer arithmetic: a half of the last digit is rounded up, which floating point does not guarantee.
/** @type {(value: bigint, base: bigint, symbols: string[]) => string} */
function wholeNumber(value, base, symbols) {
  if (value >= base ** BigInt(symbols.length)) return `${Number(value).toExponential(2)} ${symbols[0]}`.trim();
  /** @type {(power: bigint) => bigint} */
  const hundredths = (power) => (value * 200n + base ** power) / (2n * base ** power);
  let power = 0n;
  while (hundredths(power) >= base * 100n && power + 1n < symbols.length) power += 1n;
  if (power === 0n) return `${value} ${symbols[0]}`.trim();
  const digits = hundredths(power);
  return `${digits / 100n}.${String(digits % 100n).padStart(2, "0")} ${symbols[Number(power)]}`.trim();
}

/** @type {(value: number, base: number, symbols: string[]) => string} */
function fraction(value, base, symbols) {
  let power = 0;
  let number = value;
  while (Number(Math.abs(number).toFixed(2)) >= base && power + 1 < symbols.length) {
    power += 1;
    number = value / base ** power;
  }
  const digits = Number(number.toFixed(2)) === 0 ? number.toExponential(2) : number.toFixed(2);
  return `${digits} ${symbols[power]}`.trim();
}
