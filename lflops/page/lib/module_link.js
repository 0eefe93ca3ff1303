// Labels of several modules, such as `layers.*.mlp` and `layers.{0-2,4}.mlp`, and links to their rows in Modules.

const LISTED = /^\{[\d,-]+\}$/;

// The state of Modules that shows a module, or all modules of a label.
/** @type {(name: string) => State} */
export function stateOfModules(name) {
  const parts = name.split(".");
  if (!parts.some((part) => part === "*" || LISTED.test(part))) return { row: name, filter: "", regex: "", flat: "" };
  const pattern = parts.map((part) => (part === "*" ? "\\d+" : LISTED.test(part) ? listed(part) : part.replace(/[^\w]/g, "\\$&"))).join("[.]");
  return { row: "", filter: `^${pattern}$`, regex: "true" };
}

// A regular expression for the numbers of a list.
/** @type {(part: string) => string} */
function listed(part) {
  const numbers = part.slice(1, -1).split(",").flatMap((range) => {
    const [first, last = first] = range.split("-").map(Number);
    return Array.from({ length: last - first + 1 }, (_, at) => first + at);
  });
  return `(?:${numbers.join("|")})`;
}

// Join names that differ in numbers, such as `layers.{0-2,4}.mlp`.
/** @type {(names: string[]) => string} */
export function spelledOut(names) {
  const parts = names.map((name) => name.split("."));
  return parts[0].map((first, at) => {
    const labels = new Set(parts.map((each) => each[at]));
    return labels.size === 1 ? first : `{${ranges([...labels].map(Number).sort((a, b) => a - b))}}`;
  }).join(".");
}

// Join rising numbers, such as `0-2,4`.
/** @type {(numbers: number[]) => string} */
function ranges(numbers) {
  const known = new Set(numbers);
  const starts = numbers.filter((number) => !known.has(number - 1));
  const ends = numbers.filter((number) => !known.has(number + 1));
  return starts.map((start, at) => (ends[at] > start ? `${start}-${ends[at]}` : `${start}`)).join(",");
}
