// The steps of a run as bars, marks and sentences. A group is one step, or neighbouring steps of a long run.

import { duration, exact, percent, phaseLabel } from "./format.js";

/**
 * `groups` are the steps of the bar.
 * @typedef {{ groups: StepGroup[], seconds: number, spent: Record<string, number>, isProfiled: boolean }} StepBar
 * `at` is the position of a bar; a window covers the bars up to `end`.
 * @typedef {{ kind: "window" | "checkpoint" | "validation" | "crash", at: number, end: number, text: string }} StepMark
 */

// A step longer than this multiple of p95 is cut, so that the others stay visible.
const CUT = 2;
// Shorter activities between two steps have no mark.
const LEAST_MARKED = 0.001;

/** @type {(groups: StepGroup[]) => number} */
export const stepsIn = (groups) => groups.reduce((sum, { steps = 1 }) => sum + steps, 0);

// Bars in the order in which the steps ran. In a run of more than `most` steps, a bar has neighbouring groups with about the same number of steps in
// each bar. A bar ends where a window or a start begins or ends, so that each has its mark.
/** @type {(groups: StepGroup[], most: number) => StepBar[]} */
export function barsOf(groups, most) {
  const least = stepsIn(groups) / Math.max(most, 1);
  /** @type {StepGroup[][]} */
  const parts = [];
  let room = 0;
  for (const [at, group] of groups.entries()) {
    const last = groups[at - 1] ?? group;
    const isApart = (last.mode === "profiled") !== (group.mode === "profiled") || (last.start ?? 0) !== (group.start ?? 0);
    if (isApart) room = 0;
    if (room <= 0) { parts.push([]); room += Math.max(least, 1); }
    parts[parts.length - 1].push(group);
    const { steps = 1 } = group;
    room = steps > least ? 0 : room - steps;
  }
  return parts.map((part) => {
    const spent = meanByPhase(part);
    return { groups: part, spent, seconds: sumOf(spent), isProfiled: part.every(({ mode }) => mode === "profiled") };
  });
}

/** @type {(values: Record<string, number>) => number} */
const sumOf = (values) => Object.values(values).reduce((sum, value) => sum + value, 0);

/** @type {(groups: StepGroup[]) => Record<string, number>} */
export function meanByPhase(groups) {
  /** @type {Record<string, number>} */
  const sums = {};
  for (const { spent } of groups) for (const [phase, seconds] of Object.entries(spent)) sums[phase] = (sums[phase] ?? 0) + seconds;
  const steps = stepsIn(groups);
  return Object.fromEntries(Object.entries(sums).map(([phase, seconds]) => [phase, seconds / steps]));
}

// All phases, in the order of a step.
/** @type {(groups: StepGroup[]) => string[]} */
export function phasesOf(groups) {
  const order = ["data", "transfer", "forward", "backward", "wait", "sync", "clip", "optimizer"];
  const found = new Set(groups.flatMap(({ spent }) => Object.keys(spent)));
  const rest = [...found].filter((phase) => !order.includes(phase) && phase !== "other").sort();
  return [...order, ...rest, "other"].filter((phase) => found.has(phase));
}

// The upper end of the axis.
/** @type {(bars: StepBar[], p95: number | null) => number} */
export function highest(bars, p95) {
  const longest = bars.reduce((most, { seconds }) => Math.max(most, seconds), 0);
  return p95 && longest > CUT * p95 ? CUT * p95 : longest;
}

/** @type {(bars: StepBar[]) => StepMark[]} */
export function marksOf(bars) {
  /** @type {StepMark[]} */
  const marks = [];
  bars.forEach(({ groups, isProfiled }, at) => {
    const last = marks.findLast(({ kind }) => kind === "window");
    const name = nameOf(groups);
    if (isProfiled && last && last.end === at - 1) last.end = at;
    else if (isProfiled) marks.push({ kind: "window", at, end: at, text: `window that begins at ${name}` });
    const between = meanOver(groups);
    if ((between.validation ?? 0) > LEAST_MARKED) marks.push({ kind: "validation", at, end: at, text: `validation before ${name}, ${duration(between.validation)}` });
    if ((between.checkpoint_save ?? 0) > LEAST_MARKED) marks.push({ kind: "checkpoint", at, end: at, text: `checkpoint before ${name}, ${duration(between.checkpoint_save)}` });
    const before = at ? bars[at - 1].groups.at(-1)?.start ?? 0 : 0;
    if (at && (groups[0].start ?? 0) > before) marks.push({ kind: "crash", at, end: at, text: `restart before ${name}` });
  });
  return marks;
}

/** @type {(groups: StepGroup[]) => Record<string, number>} */
function meanOver(groups) {
  /** @type {Record<string, number>} */
  const sums = {};
  for (const { between = {} } of groups) for (const [name, seconds] of Object.entries(between)) sums[name] = (sums[name] ?? 0) + seconds;
  return sums;
}

/** @type {(groups: StepGroup[]) => string} */
export function nameOf(groups) {
  const [first, last] = [groups[0].first, groups[groups.length - 1].last];
  return first === last ? `step ${exact(first)}` : `steps ${exact(first)} to ${exact(last)}`;
}

/** @type {Record<string, string>} */
const MODES = { profiled: "profiled", warm_up: "warm-up" };

// One bar, or the selected bars, in words: time, phases, and what happened before.
/** @type {(bars: StepBar[]) => string} */
export function inWords(bars) {
  const groups = bars.flatMap((bar) => bar.groups);
  const spent = meanByPhase(groups);
  const seconds = sumOf(spent);
  const phases = phasesOf(groups).map((phase) => `${phaseLabel(phase)} ${duration(spent[phase] ?? 0)} (${percent((spent[phase] ?? 0) / (seconds || 1))})`);
  const modes = [...new Set(groups.map(({ mode = "unprofiled" }) => mode))];
  const mode = modes.length === 1 && MODES[modes[0]] ? `, ${MODES[modes[0]]}` : "";
  const mean = stepsIn(groups) > 1 ? "mean " : "";
  const between = Object.entries(meanOver(groups)).filter(([, value]) => value > LEAST_MARKED).map(([name, value]) => `${name.replaceAll("_", " ")} ${duration(value)}`);
  return `${nameOf(groups)}${mode}: ${mean}${duration(seconds)}: ${phases.join(", ")}${between.length ? `; between steps: ${between.join(", ")}` : ""}`;
}
