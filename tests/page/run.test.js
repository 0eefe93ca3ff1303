// Test the time account of a run: a first start of 30 s, 10 s in which the run is down, and a second start of 20 s.

import assert from "node:assert/strict";
import { test } from "node:test";

import { categoriesOf } from "../../lflops/page/lib/run.js";

/** @type {(end: number, step: number) => Ledger["slow_steps"][number]} */
const slow = (end, step) => ({ step, end, seconds: 2, usual: 0.1, cost: 1.9, cause: "gc" });
/** @type {Ledger} */
const LEDGER = {
  seconds: { start_up: 15, "training/data": 18, "training/forward": 15, "slow/gc": 2, down: 10 }, total: 60,
  slow_steps: [slow(12, 5), slow(29, 8), slow(12, 15)],
  starts: [
    { begin: 100, seconds: 30, first_step: 0, last_step: 10, ended: "killed" },
    { begin: 140, seconds: 20, first_step: 10, last_step: 20, ended: "finished" },
  ],
  step_groups: [],
  spans: [
    { begin: 100, seconds: 10, steps: 0, spent: { start_up: 10 }, memory: 1 },
    { begin: 110, seconds: 20, steps: 10, spent: { "training/data": 18, "slow/gc": 2 }, memory: null },
    { begin: 130, seconds: 10, steps: 10, spent: { down: 10 }, memory: null },
    { begin: 140, seconds: 20, steps: 20, spent: { start_up: 5, "training/forward": 15 }, memory: 3 },
  ],
};

test("categories have their parts, the longest first", () => {
  const found = categoriesOf({ ledger: LEDGER, categories: { training: "training" }, causes: { gc: "the garbage collector" } });
  assert.deepEqual(found.map(({ name, seconds }) => [name, seconds]), [["training", 33], ["start_up", 15], ["down", 10], ["slow", 2]]);
  assert.deepEqual([found[0].parts, found[3].parts], [[["data wait", 18], ["forward", 15]], [["the garbage collector", 2]]]);
});
