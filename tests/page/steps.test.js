// Test the bars, marks and captions of the steps of a run. Of seven steps, one is a warm-up, two are profiled, one follows a
// validation and a checkpoint, and the last two belong to a second start.

import assert from "node:assert/strict";
import { test } from "node:test";

import { barsOf, highest, inWords, marksOf, meanByPhase, phasesOf } from "../../lflops/page/lib/steps.js";

/** @type {(step: number, more?: Partial<StepGroup>) => StepGroup} */
const step = (number, more = {}) => ({ first: number, last: number, spent: { forward: 0.2, data: 0.1, other: 0.1 }, longest: 0.4, ...more });
const STEPS = [
  step(1, { mode: "warm_up" }), step(2), step(3, { mode: "profiled" }), step(4, { mode: "profiled" }), step(5, { between: { validation: 0.5, checkpoint_save: 0.25 } }),
  step(5, { start: 1 }), step(6, { start: 1, spent: { forward: 0.2, data: 0.7, other: 0.1 }, longest: 1 }),
];

test("each step is a bar, or neighbours share one", () => {
  assert.deepEqual(barsOf(STEPS, 100).map(({ groups }) => groups[0].first), [1, 2, 3, 4, 5, 5, 6]);
  const bars = barsOf(STEPS, 3);
  // The window, and the second start, begin and end with a bar.
  assert.deepEqual(bars.map(({ groups }) => groups.length), [2, 2, 1, 2]);
  // The mean of two steps: (0.4 + 1) / 2
  assert.equal(bars[3].seconds.toFixed(6), "0.700000");
});

test("a group of many steps fills a bar of its own", () => {
  const groups = [step(1), step(2), step(3, { last: 8, steps: 6, spent: { data: 0.6 } }), step(9), step(10)];
  assert.deepEqual(barsOf(groups, 100).map((bar) => bar.groups.length), [1, 1, 1, 1, 1]);
  // Ten steps in at most five bars: two steps in each, but a group is not divided.
  assert.deepEqual(barsOf(groups, 5).map((bar) => bar.groups.map(({ first }) => first)), [[1, 2], [3], [9, 10]]);
});

test("a window and a start have bars of their own", () => {
  const groups = [step(1), step(2), step(3, { mode: "profiled" }), step(4, { mode: "profiled" }), step(5), step(6), step(5, { start: 1 }), step(6, { start: 1 })];
  const bars = barsOf(groups, 2);
  assert.deepEqual(bars.map((bar) => bar.groups.map(({ first }) => first)), [[1, 2], [3, 4], [5, 6], [5, 6]]);
  assert.deepEqual(marksOf(bars).map(({ kind, at }) => [kind, at]), [["window", 1], ["crash", 3]]);
});

test("a group of several steps counts as often as it has steps", () => {
  const groups = [step(1), step(2, { last: 4, steps: 3, spent: { data: 0.6 } })];
  assert.deepEqual(Object.entries(meanByPhase(groups)).map(([name, value]) => [name, value.toFixed(3)]), [["forward", "0.050"], ["data", "0.175"], ["other", "0.025"]]);
});

test("phases are in the order of a step", () => {
  assert.deepEqual(phasesOf([step(1, { spent: { other: 1, gc: 1, optimizer: 1, backward: 1, data: 1 } })]), ["data", "backward", "optimizer", "gc", "other"]);
});

test("a step far beyond p95 does not squeeze the others", () => {
  assert.equal(highest(barsOf(STEPS, 100), 0.45), 0.9);
  assert.equal(highest(barsOf(STEPS, 100), null).toFixed(6), "1.000000");
  assert.equal(highest(barsOf(STEPS, 100), 0.6).toFixed(6), "1.000000");
});

test("marks are windows, validations, checkpoints and restarts", () => {
  assert.deepEqual(marksOf(barsOf(STEPS, 100)).map(({ kind, at, end, text }) => [kind, at, end, text]), [
    ["window", 2, 3, "window that begins at step 3"], ["validation", 4, 4, "validation before step 5, 500 ms"],
    ["checkpoint", 4, 4, "checkpoint before step 5, 250 ms"], ["crash", 5, 5, "restart before step 5"],
  ]);
});

test("a bar and a selection are said in words", () => {
  const bars = barsOf(STEPS, 100);
  assert.equal(inWords([bars[6]]), "step 6: 1.00 s: data wait 700 ms (70.0 %), forward 200 ms (20.0 %), other 100 ms (10.0 %)");
  assert.equal(inWords([bars[2]]), "step 3, profiled: 400 ms: data wait 100 ms (25.0 %), forward 200 ms (50.0 %), other 100 ms (25.0 %)");
  assert.match(inWords(bars.slice(4, 7)), /^steps 5 to 6: mean 600 ms: .*; between steps: validation 500 ms, checkpoint save 250 ms$/);
});
