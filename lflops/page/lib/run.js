// The ledger of a run, as its view needs it. Moments are seconds since its begin.

/** @typedef {{ name: string, label: string, seconds: number, parts: [string, number][] }} Category */
/** @typedef {{ at: number, seconds: number, step: number | null, memory: number | null }} SpanInTime */

// The account by category, the longest first; each with its phases, or its causes in words.
/** @type {(data: RunShown) => Category[]} */
export function categoriesOf({ ledger, categories, causes }) {
  /** @type {Map<string, Category>} */
  const found = new Map();
  for (const [key, seconds] of Object.entries(ledger.seconds)) {
    const [name, part] = key.split("/");
    const each = found.get(name) ?? { name, label: categories[name] ?? name, seconds: 0, parts: [] };
    found.set(name, { ...each, seconds: each.seconds + seconds, parts: part ? [...each.parts, [name === "slow" ? causes[part] ?? part : part, seconds]] : each.parts });
  }
  const longestFirst = [...found.values()].sort((a, b) => b.seconds - a.seconds);
  return longestFirst.map((each) => ({ ...each, parts: each.parts.sort((a, b) => b[1] - a[1]) }));
}

// The parts of the run, each with the mean of its steps, slow and lost ones among them; null where none was done.
/** @type {(ledger: Ledger) => SpanInTime[]} */
export function spansInTime({ spans, starts }) {
  let before = 0;
  return spans.map(({ begin, seconds, steps, spent, memory }) => {
    const worked = Object.entries(spent).reduce((sum, [name, value]) => sum + (/^(training|slow|repeated)/.test(name) ? value : 0), 0);
    const done = steps - before;
    before = steps;
    return { at: begin - starts[0].begin, seconds, step: done > 0 && worked > 0 ? worked / done : null, memory };
  });
}

// When each slow step ended. Those of a start come one after the other: where their moments go back, the next start begins.
/** @type {(ledger: Ledger) => number[]} */
export function momentsOfSlowSteps({ slow_steps: slow, starts }) {
  let [at, before] = [0, 0];
  return slow.map(({ end, step }) => {
    while (at + 1 < starts.length && (end < before || end > starts[at].seconds || step > starts[at].last_step)) [at, before] = [at + 1, 0];
    before = end;
    return starts[at].begin + end - starts[0].begin;
  });
}
