// The modules as rows: their tree, which of them are shown, and in what order. A row is a position in the payload's columns.

/**
 * @typedef {{
 *   below: number[][], names: string[], open: Set<number>, matches: Reader<boolean> | null, compare: Order, isFlat: boolean,
 * }} Tree
 */

const OPEN_AT_FIRST = 200;

// The rows right below each row, in the model's order.
/** @type {(names: string[]) => number[][]} */
export function children(names) {
  const numbers = new Map(names.map((name, row) => [name, row]));
  /** @type {number[][]} */
  const below = names.map(() => []);
  names.forEach((name, row) => {
    if (name !== "") below[numbers.get(name.slice(0, Math.max(name.lastIndexOf("."), 0))) ?? 0].push(row);
  });
  return below;
}

/** @type {(name: string) => string} */
export function lastOf(name) {
  return name.slice(name.lastIndexOf(".") + 1);
}

// A row and its parents, the root first.
/** @type {(names: string[], row: number) => number[]} */
export function ancestors(names, row) {
  const parts = names[row] === "" ? [] : names[row].split(".");
  return parts.reduce((above, _, at) => [...above, names.indexOf(parts.slice(0, at + 1).join("."))], [names.indexOf("")]);
}

/** @type {(name: string) => number} */
export function depth(name) {
  return name === "" ? 0 : name.split(".").length;
}

// A test of a row by its name or class. Throws a SyntaxError if the text is not a regular expression.
/** @type {(text: string, isRegex: boolean, names: string[], kinds: Reader<string>) => Reader<boolean> | null} */
export function matcher(text, isRegex, names, kinds) {
  if (text === "") return null;
  if (isRegex) {
    const pattern = new RegExp(text);
    return (row) => pattern.test(names[row]) || pattern.test(kinds(row));
  }
  const wanted = text.toLowerCase();
  return (row) => names[row].toLowerCase().includes(wanted) || kinds(row).toLowerCase().includes(wanted);
}

// A comparison of rows by a value; unknown values come last in both directions. Without a value the model's order stays.
/** @type {(value: Reader | null, isDescending: boolean, size: number) => Order} */
export function order(value, isDescending, size) {
  if (value === null) return null;
  const keys = Array.from({ length: size }, (_, row) => value(row));
  const numbers = keys.map((key) => (key === null ? null : Number(key)));
  const sign = isDescending ? -1 : 1;
  return (a, b) => {
    const [one, other] = [numbers[a], numbers[b]];
    if (one === null || other === null) return Number(one === null) - Number(other === null) || a - b;
    return sign * (one - other) || a - b;
  };
}

// A comparison by name, with numbers in names compared as numbers.
/** @type {(names: string[], isDescending: boolean) => Order} */
export function byName(names, isDescending) {
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  return (a, b) => (isDescending ? -1 : 1) * compare(names[a], names[b]);
}

// The rows to show, from top to bottom: in a tree, rows with open parents; with a filter, the rows that match and their parents.
/** @type {(tree: Tree) => number[]} */
export function visible({ below, names, open, matches, compare, isFlat }) {
  if (isFlat) {
    const all = names.map((_, row) => row).filter((row) => matches === null || matches(row));
    return compare === null ? all : all.sort(compare);
  }
  const isShown = matches === null ? null : matchesAndAncestors(matches, below);
  /** @type {number[]} */
  const shown = [];
  const root = names.indexOf("");
  const stack = [root];
  for (let row = stack.pop(); row !== undefined; row = stack.pop()) {
    shown.push(row);
    if (isShown === null && !open.has(row)) continue;
    const next = isShown === null ? below[row] : below[row].filter((child) => isShown[child]);
    const sorted = compare === null ? next : [...next].sort(compare);
    for (let index = sorted.length - 1; index >= 0; index -= 1) stack.push(sorted[index]);
  }
  return isShown === null || isShown[root] ? shown : [];
}

/** @type {(matches: Reader<boolean>, below: number[][]) => Uint8Array} */
function matchesAndAncestors(matches, below) {
  const isShown = new Uint8Array(below.length);
  const parents = new Int32Array(below.length).fill(-1);
  below.forEach((rows, above) => rows.forEach((row) => { parents[row] = above; }));
  for (let row = 0; row < below.length; row += 1) {
    if (matches(row)) for (let above = row; above >= 0 && !isShown[above]; above = parents[above]) isShown[above] = 1;
  }
  return isShown;
}

// The rows that are open at first: level by level, as long as there are not too many rows.
/** @type {(names: string[], below: number[][]) => number[]} */
export function openAtFirst(names, below) {
  /** @type {number[]} */
  const open = [];
  let level = [names.indexOf("")];
  let shown = 1;
  while (level.length) {
    const next = level.flatMap((row) => below[row]);
    shown += next.length;
    if (shown > OPEN_AT_FIRST && open.length) break;
    open.push(...level);
    level = next;
  }
  return open;
}
