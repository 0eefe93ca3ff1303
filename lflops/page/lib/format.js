// Numbers as text, rounded as the terminal's report rounds them. A count beyond 2^53 comes as a string of its digits; null is unknown.

const UNKNOWN = "–";
const DECIMAL = ["", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q"];
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"];
const SECONDS = ["ns", "µs", "ms", "s"];

export function count(value) {
  return scaled(value, 1000, DECIMAL);
}

export function rate(value) {
  return scaled(value, 1000, DECIMAL.map((prefix) => `${prefix}FLOP/s`));
}

export function bandwidth(value) {
  return scaled(value, 1000, DECIMAL.map((prefix) => `${prefix}B/s`));
}

export function size(value) {
  return scaled(value, 1024, BINARY);
}

export function duration(value) {
  if (value === null) return UNKNOWN;
  if (value === 0) return "0 s";
  if (Math.abs(value) >= 1) return `${value.toFixed(2)} s`;
  return inexact(value * 1e9, 1000, SECONDS);
}

export function percent(share) {
  if (share === null) return UNKNOWN;
  if (share === 0) return "0 %";
  const rounded = (share * 100).toFixed(1);
  return Number(rounded) === 0 ? `${share > 0 ? "<" : ">-"}0.1 %` : `${rounded} %`;
}

// What a ratio adds, with its sign.
export function signed(ratio) {
  const text = percent(ratio === null ? null : ratio - 1);
  return ratio > 1 && /^\d/.test(text) ? `+${text}` : text;
}

// Where a ratio may lie.
export function between({ low, high }) {
  return low === null ? UNKNOWN : `${signed(low)} to ${signed(high)}`;
}

// A power of ten as an axis has it: 0.01, 1, 100 k.
export function decade(power, unit = "") {
  const prefix = Math.min(Math.max(Math.floor(power / 3), 0), DECIMAL.length - 1);
  return `${Number(`1e${power - 3 * prefix}`)} ${DECIMAL[prefix]}${unit}`.trim();
}

// The value to the last digit, for a tooltip and for whoever copies it.
export function exact(value) {
  if (value === null) return "unknown";
  if (typeof value === "number" && !Number.isInteger(value)) return String(value);
  return String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}

function scaled(value, base, symbols) {
  if (value === null) return UNKNOWN;
  const isWhole = typeof value === "string" || Number.isSafeInteger(value);
  return isWhole ? whole(BigInt(value), BigInt(base), symbols) : inexact(value, base, symbols);
}

// In whole numbers: a half of the last digit is rounded up, which floating point does not promise.
function whole(value, base, symbols) {
  if (value >= base ** BigInt(symbols.length)) return `${Number(value).toExponential(2)} ${symbols[0]}`.trim();
  const hundredths = (power) => (value * 200n + base ** power) / (2n * base ** power);
  let power = 0n;
  while (hundredths(power) >= base * 100n && power + 1n < symbols.length) power += 1n;
  if (power === 0n) return `${value} ${symbols[0]}`.trim();
  const digits = hundredths(power);
  return `${digits / 100n}.${String(digits % 100n).padStart(2, "0")} ${symbols[power]}`.trim();
}

function inexact(value, base, symbols) {
  let power = 0;
  let number = value;
  while (Number(Math.abs(number).toFixed(2)) >= base && power + 1 < symbols.length) {
    power += 1;
    number = value / base ** power;
  }
  const digits = Number(number.toFixed(2)) === 0 ? number.toExponential(2) : number.toFixed(2);
  return `${digits} ${symbols[power]}`.trim();
}
