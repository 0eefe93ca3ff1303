// The ledger of a run, as its view needs it.

import { phaseLabel } from "./format.js";

/** @typedef {{ name: string, label: string, seconds: number, parts: [string, number][] }} Category */

// Seconds by category, the longest first, each with its phases, or its causes in words.
/** @type {(data: Pick<LedgerShown, "ledger" | "categories" | "causes">) => Category[]} */
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
