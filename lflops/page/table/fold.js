// Neighbours that are alike, in their counts and in those of all below them, share a row, as in the terminal's report: the first stands for
// them. Below it, a row stands for those in its place in each of them.

// `alike` gives a row's number, the same for two that are alike; `unfolded` has the first rows of runs that are shown one by one. Gives for
// each row the rows right below it that are left, and for each of these its `run` of neighbours and all `places` that it stands for.
export function folded(root, below, alike, unfolded) {
  const left = below.map(() => []);
  const stands = new Map([[root, { run: [root], places: [root], first: 0 }]]);
  const waiting = [root];
  while (waiting.length) {
    const row = waiting.pop();
    const { places } = stands.get(row);
    for (const { from, to, first } of runsOf(below[row], alike, unfolded)) {
      const leader = below[row][from];
      const run = below[row].slice(from, to);
      stands.set(leader, { run, places: places.length === 1 ? run : places.flatMap((place) => below[place].slice(from, to)), first });
      left[row].push(leader);
      if (below[leader].length) waiting.push(leader);
    }
  }
  return { below: left, stands };
}

// From where to where siblings share a row; of a run that is unfolded, how many its first one could stand for.
function runsOf(siblings, alike, unfolded) {
  const found = [];
  for (let from = 0, to = 0; from < siblings.length; from = to) {
    const number = alike(siblings[from]);
    for (to = from + 1; to < siblings.length && alike(siblings[to]) === number;) to += 1;
    if (!unfolded.has(siblings[from])) found.push({ from, to, first: 0 });
    else for (let at = from; at < to; at += 1) found.push({ from: at, to: at + 1, first: at === from ? to - from : 0 });
  }
  return found;
}

// What a run is called by its labels: numbers read as a range, a few other names are all said.
export function runLabel(labels) {
  if (labels.length === 1) return labels[0];
  const isNumbered = new Set(labels.map((label) => label.replace(/\d+$/, ""))).size === 1;
  return isNumbered || labels.length > 3 ? `${labels[0]}…${labels.at(-1)}` : labels.join(", ");
}

// What one of many rows has, where all of them have the same.
export function ofOne(read, rows) {
  return read(rows[0]);
}

// The mean of a time, where it is known of each.
export function meanOf(read, rows) {
  let sum = 0;
  for (const row of rows) {
    if (read(row) === null) return null;
    sum += read(row);
  }
  return sum / rows.length;
}

// Of a rate the same work in the mean time.
export function meanRate(read, rows) {
  const slowness = meanOf((row) => (read(row) === null ? null : 1 / read(row)), rows);
  return slowness === null ? null : 1 / slowness;
}

export function greatestOf(read, rows) {
  return rows.reduce((most, row) => (read(row) !== null && (most === null || Number(read(row)) > Number(most)) ? read(row) : most), null);
}
