// The modules as rows: their tree, which of them are seen, and in what order. Rows are their numbers in the payload's columns.

const OPEN_AT_FIRST = 200;

// For each row the rows right below it, in the model's order.
export function children(names) {
  const numbers = new Map(names.map((name, row) => [name, row]));
  const below = names.map(() => []);
  names.forEach((name, row) => {
    if (name !== "") below[numbers.get(name.slice(0, Math.max(name.lastIndexOf("."), 0)))].push(row);
  });
  return below;
}

export function lastOf(name) {
  return name.slice(name.lastIndexOf(".") + 1);
}

// A row with all above it, the root first.
export function ancestors(names, row) {
  const parts = names[row] === "" ? [] : names[row].split(".");
  return parts.reduce((found, _, at) => [...found, names.indexOf(parts.slice(0, at + 1).join("."))], [names.indexOf("")]);
}

export function depth(name) {
  return name === "" ? 0 : name.split(".").length;
}

// A test of a row by its name or its class. Throws a SyntaxError where the text is no regular expression.
export function matcher(text, isRegex, names, kinds) {
  if (text === "") return null;
  if (isRegex) {
    const pattern = new RegExp(text);
    return (row) => pattern.test(names[row]) || pattern.test(kinds(row));
  }
  const wanted = text.toLowerCase();
  return (row) => names[row].toLowerCase().includes(wanted) || kinds(row).toLowerCase().includes(wanted);
}

// A comparison of rows: the most first, or the least; what is unknown comes last either way. Without a key the model's order stays.
export function order(value, isDescending, size) {
  if (value === null) return null;
  const keys = Array.from({ length: size }, (_, row) => value(row));
  const numbers = keys.map((key) => (key === null ? null : Number(key)));
  const sign = isDescending ? -1 : 1;
  return (a, b) => {
    if (numbers[a] === null || numbers[b] === null) return (numbers[a] === null) - (numbers[b] === null) || a - b;
    return sign * (numbers[a] - numbers[b]) || a - b;
  };
}

// By name, numbers within it as numbers.
export function byName(names, isDescending) {
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  return (a, b) => (isDescending ? -1 : 1) * compare(names[a], names[b]);
}

// The rows to show from top to bottom: of a tree those whose ancestors are open, and with a filter what matches and all above it.
export function visible({ below, names, open, matches, compare, isFlat }) {
  if (isFlat) {
    const all = names.map((_, row) => row).filter((row) => matches === null || matches(row));
    return compare === null ? all : all.sort(compare);
  }
  const kept = matches === null ? null : keptBy(matches, below);
  const shown = [];
  const root = names.indexOf("");
  const stack = [root];
  while (stack.length) {
    const row = stack.pop();
    shown.push(row);
    if (kept === null && !open.has(row)) continue;
    const next = kept === null ? below[row] : below[row].filter((child) => kept[child]);
    const sorted = compare === null ? next : [...next].sort(compare);
    for (let index = sorted.length - 1; index >= 0; index -= 1) stack.push(sorted[index]);
  }
  return kept === null || kept[root] ? shown : [];
}

function keptBy(matches, below) {
  const kept = new Uint8Array(below.length);
  const parents = new Int32Array(below.length).fill(-1);
  below.forEach((rows, above) => rows.forEach((row) => { parents[row] = above; }));
  for (let row = 0; row < below.length; row += 1) {
    if (matches(row)) for (let above = row; above >= 0 && !kept[above]; above = parents[above]) kept[above] = 1;
  }
  return kept;
}

// Level by level, as long as that is not more than can be looked over.
export function openAtFirst(names, below) {
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
