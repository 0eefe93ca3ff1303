// Fold repeats: neighbours with the same counts, down to all their submodules, share a row, as in the terminal. It is the row of the first of
// them. Each row below it stands for the modules at its position in each of them.

// `identity` returns the same number for rows that can share a row; `unfolded` has the first rows of groups that are shown one by one. Returns for
// each row the remaining rows right below it, and for each remaining row the rows that it stands for.
/** @type {(root: number, below: number[][], identity: Reader, unfolded: Set<number>) => { below: number[][], groups: Map<number, FoldedRow> }} */
export function folded(root, below, identity, unfolded) {
  /** @type {number[][]} */
  const left = below.map(() => []);
  /** @type {Map<number, FoldedRow>} */
  const groups = new Map([[root, { run: [root], members: [root], first: 0 }]]);
  const waiting = [root];
  for (let row = waiting.pop(); row !== undefined; row = waiting.pop()) {
    const members = groups.get(row)?.members ?? [];
    for (const { from, to, first } of runsOf(below[row], identity, unfolded)) {
      const leader = below[row][from];
      const run = below[row].slice(from, to);
      groups.set(leader, { run, members: members.length === 1 ? run : members.flatMap((member) => below[member].slice(from, to)), first });
      left[row].push(leader);
      if (below[leader].length) waiting.push(leader);
    }
  }
  return { below: left, groups };
}

// The ranges of siblings that share a row. `first` is the size of an unfolded group, at its first row.
/** @type {(siblings: number[], identity: Reader, unfolded: Set<number>) => { from: number, to: number, first: number }[]} */
function runsOf(siblings, identity, unfolded) {
  const ranges = [];
  for (let from = 0, to = 0; from < siblings.length; from = to) {
    const number = identity(siblings[from]);
    for (to = from + 1; to < siblings.length && identity(siblings[to]) === number;) to += 1;
    if (!unfolded.has(siblings[from])) ranges.push({ from, to, first: 0 });
    else for (let at = from; at < to; at += 1) ranges.push({ from: at, to: at + 1, first: at === from ? to - from : 0 });
  }
  return ranges;
}

// The label of a group: a range of numbers, or a list of a few other names.
/** @type {(labels: string[]) => string} */
export function runLabel(labels) {
  if (labels.length === 1) return labels[0];
  const isNumbered = new Set(labels.map((label) => label.replace(/\d+$/, ""))).size === 1;
  return isNumbered || labels.length > 3 ? `${labels[0]}…${labels.at(-1)}` : labels.join(", ");
}

// The value of rows that all have the same value.
/** @type {(read: Reader, rows: number[]) => any} */
export function ofOne(read, rows) {
  return read(rows[0]);
}

// The sum of the values, exact for counts; null if one is unknown.
/** @type {(read: Reader, rows: number[]) => Count} */
export function sumOf(read, rows) {
  let sum = 0;
  for (const row of rows) {
    const value = read(row);
    if (value === null) return null;
    if (typeof value === "string") return String(rows.reduce((all, each) => all + BigInt(read(each)), 0n));
    sum += value;
  }
  return Number.isInteger(sum) && !Number.isSafeInteger(sum) ? String(rows.reduce((all, each) => all + BigInt(read(each)), 0n)) : sum;
}

// The mean of times; null if one is unknown.
/** @type {(read: Reader, rows: number[]) => number | null} */
export function meanOf(read, rows) {
  let sum = 0;
  for (const row of rows) {
    if (read(row) === null) return null;
    sum += Number(read(row));
  }
  return sum / rows.length;
}

// The mean of rates: the same work in the mean time.
/** @type {(read: Reader, rows: number[]) => number | null} */
export function meanRate(read, rows) {
  if (rows.every((row) => read(row) === 0)) return 0;
  const slowness = meanOf((row) => (read(row) === null ? null : 1 / read(row)), rows);
  return slowness === null ? null : 1 / slowness;
}

/** @type {(read: Reader, rows: number[]) => Count} */
export function greatestOf(read, rows) {
  return rows.reduce((/** @type {Count} */ most, row) => (read(row) !== null && (most === null || Number(read(row)) > Number(most)) ? read(row) : most), null);
}
