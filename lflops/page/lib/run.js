// The ledger of a run, as its view needs it. Moments are seconds since the start of the run.

import { phaseLabel } from "./format.js";

/** @typedef {{ name: string, label: string, seconds: number, parts: [string, number][] }} Category */
/** @typedef {{ at: number, seconds: number, step: number | null, memory: number | null }} SpanInTime */

// Seconds by category, the longest first, each with its phases, or its causes in words.
/** @type {(data: RunShown) => Category[]} */
export function categoriesOf({ ledger, categories, causes }) {
  /** @type {Map<string, Category>} */
  const found = new Map();
  for (const [key, seconds] of Object.entries(ledger.seconds)) {
    const [name, part] = key.split("/");
    const each = found.get(name) ?? { name, label: categories[name] ?? name, seconds: 0, parts: [] };
    found.set(name, { ...each, seconds: each.seconds + seconds, parts: part ? [...each.parts, [name === "slow" ? causes[part] ?? part : phaseLabel(part), seconds]] : each.parts });
  }
  const longestFirst = [...found.values()].sort((a, b) => b.seconds - a.seconds);
  return longestFirst.map((each) => ({ ...each, parts: each.parts.sort((a, b) => b[1] - a[1]) }));
}

// The parts of the run, each with its mean step, including slow and repeated steps; null without a step.
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

// The end of each slow step. The slow steps of a start are in order: if the moments go back, the next start begins.
/** @type {(ledger: Ledger) => number[]} */
export function momentsOfSlowSteps({ slow_steps: slow, starts }) {
  let [at, before] = [0, 0];
  return slow.map(({ end, step }) => {
    while (at + 1 < starts.length && (end < before || end > starts[at].seconds || step > starts[at].last_step)) [at, before] = [at + 1, 0];
    before = end;
    return starts[at].begin + end - starts[0].begin;
  });
}
