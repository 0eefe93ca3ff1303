// Test the rows of the module table (tree, order, filter, folded rows, columns) and the changes that Compare shows for a row.

import assert from "node:assert/strict";
import { test } from "node:test";

import { spelledOut, stateOfModules } from "../../lflops/page/lib/module_link.js";
import { brief, isSameWindow, nearest } from "../../lflops/page/lib/windows.js";
import { folded, greatestOf, meanOf, meanRate, runLabel, sumOf } from "../../lflops/page/table/fold.js";
import { columns, reader } from "../../lflops/page/table/module_columns.js";
import { ancestors, byName, children, depth, lastOf, matcher, openAtFirst, order, visible } from "../../lflops/page/table/module_rows.js";
import { differs, isChanged, ratioOf } from "../../lflops/page/views/compare_table.js";

const NAMES = ["", "layers", "layers.0", "layers.0.fc", "layers.1", "layers.1.fc", "head"];
const BELOW = [[1, 6], [2, 4], [3], [], [5], [], []];
const tree = { below: BELOW, names: NAMES, open: new Set([0, 1]), matches: null, compare: null, isFlat: false };

test("the tree is that of the names, in the model's order", () => {
  assert.deepEqual(children(NAMES), BELOW);
  assert.deepEqual(ancestors(NAMES, 3), [0, 1, 2, 3]);
  assert.deepEqual([NAMES.map(depth), lastOf("layers.0.fc"), lastOf("head")], [[0, 1, 2, 3, 2, 3, 1], "fc", "head"]);
});

test("rows are shown as far as their parents are open", () => {
  assert.deepEqual(visible(tree), [0, 1, 2, 4, 6]);
  assert.deepEqual(visible({ ...tree, isFlat: true }), [0, 1, 2, 3, 4, 5, 6]);
});

test("with a filter what matches is shown, and all above it", () => {
  assert.deepEqual(visible({ ...tree, matches: matcher("1.FC", false, NAMES, () => "Linear") }), [0, 1, 4, 5]);
  assert.deepEqual(visible({ ...tree, matches: matcher("^head$", true, NAMES, () => "") }), [0, 6]);
  assert.deepEqual(visible({ ...tree, matches: matcher("nothing", false, NAMES, () => "") }), []);
  assert.throws(() => matcher("(", true, NAMES, () => ""), SyntaxError);
});

test("unknown values come last either way, and equal ones keep their order", () => {
  const values = [3, null, 1, "9007199254740993", 1];
  const sorted = (isDown) => [0, 1, 2, 3, 4].sort(order((row) => values[row], isDown, 5));
  assert.deepEqual([sorted(true), sorted(false)], [[3, 0, 2, 4, 1], [2, 4, 0, 3, 1]]);
  assert.equal(order(null, true, 5), null);
  assert.deepEqual([0, 1, 2].sort(byName(["a.10", "a.9", "b"], false)), [1, 0, 2]);
});

test("levels are open at first as long as they are not too many", () => {
  assert.deepEqual(openAtFirst(NAMES, BELOW), [0, 1, 6, 2, 4, 3, 5]);
  const many = ["", ...Array.from({ length: 300 }, (_, number) => String(number))];
  assert.deepEqual(openAtFirst(many, children(many)), [0]);
});

test("neighbours with the same counts share a row", () => {
  const identity = (row) => ({ 2: 1, 4: 1, 3: 2, 5: 2 })[row] ?? -row;
  const { below, groups } = folded(0, BELOW, identity, new Set());
  assert.deepEqual(below, [[1, 6], [2], [3], [], [], [], []]);
  assert.deepEqual(groups.get(2), { run: [2, 4], members: [2, 4], first: 0 });
  assert.deepEqual(groups.get(3), { run: [3], members: [3, 5], first: 0 });
  const unfolded = folded(0, BELOW, identity, new Set([2]));
  assert.deepEqual([unfolded.below[1], unfolded.groups.get(2).first], [[2, 4], 2]);
});

test("a run's label is a range of numbers, or a list of a few names", () => {
  assert.deepEqual([["a"], ["0", "1", "2"], ["q", "k"], ["q", "k", "v", "o"]].map(runLabel), ["a", "0…2", "q, k", "q…o"]);
});

test("the mean of times is unknown where one is, that of rates is over the time", () => {
  const values = [1, 3, null];
  const read = (row) => values[row];
  assert.deepEqual([meanOf(read, [0, 1]), meanOf(read, [0, 2]), greatestOf(read, [0, 1, 2])], [2, null, 3]);
  assert.equal(meanRate(read, [0, 1]), 1.5);
});

test("a column of one value is that of all rows", () => {
  const table = { name: ["", "a"], calls: 1, parameters: ["9007199254740993", 2], "forward.macs": [4, 0], "forward.seconds": [2, null] };
  assert.deepEqual([0, 1].map(reader(table, "calls")), [1, 1]);
  assert.equal(reader(table, "missing")(0), null);
  const shown = columns(table, [0, 1]);
  assert.deepEqual(shown.map(({ id }) => id), ["time", "calls", "parameters", "forward.macs", "forward.seconds", "forward.rate"]);
  assert.deepEqual([0, 1].map(shown[5].total), [4, null]);
  const [rate] = columns(table, [0, 1], { step: null, peak: null, highest: 3e12 }).filter(({ id }) => id === "forward.rate");
  assert.deepEqual([3e12, 4e12, null].map((each) => rate.text(each)), ["3.00 TFLOP/s", "4.00 TFLOP/s (over the peak)", "–"]);
  assert.deepEqual([sumOf(reader(table, "parameters"), [0, 1]), sumOf(shown[0].total, [0, 1])], ["9007199254740995", null]);
});

test("a window is found as far as there is one", () => {
  const windows = [["a", "fit", 1], ["a", "fit", 2], ["b", "fit", 1]].map(([run, tag, step]) => ({ run, tag, step }));
  assert.equal(nearest(windows, { run: "a", tag: "fit", step: "1" }), windows[0]);
  assert.equal(nearest(windows, { run: "a", tag: "test", step: "7" }), windows[1]);
  assert.equal(nearest(windows, {}), windows[2]);
  assert.equal(nearest([], {}), undefined);
  assert.deepEqual([isSameWindow(windows[0], { ...windows[0], step: "1" }), isSameWindow(windows[0], windows[1])], [true, false]);
  assert.deepEqual(["lflops/fit/profile", "mine"].map(brief), ["fit", "mine"]);
});

test("what is unknown differs from nothing, and has no ratio", () => {
  assert.deepEqual([[1, 2], [1, 1], [null, 1], [1, null]].map(([before, after]) => differs({ before, after })), [true, false, false, false]);
  assert.deepEqual([[2, 3], [0, 1], [null, 1], ["2", "4"]].map(([before, after]) => ratioOf({ before, after })), [1.5, null, null, 2]);
  assert.deepEqual(["slower", "faster", "same", null].map((verdict) => isChanged({ verdict })), [true, true, false, false]);
});

test("a label of several modules leads to their rows", () => {
  const names = [0, 1, 2, 4, 11].map((number) => `layers.${number}.m+`);
  const label = spelledOut(names);
  assert.equal(label, "layers.{0-2,4,11}.m+");
  const found = new RegExp(stateOfModules(label).filter);
  assert.deepEqual(["layers.3.m+", "layers.1.m+.x", ...names].filter((name) => found.test(name)), names);
  assert.equal(spelledOut(["a.1.b"]), "a.1.b");
  assert.deepEqual([stateOfModules("layers.*").filter, stateOfModules("layers.1").row], ["^layers[.]\\d+$", "layers.1"]);
});
