// Test the export of tables as CSV: quoting, protection from spreadsheet formulas, exact values of cells.

import assert from "node:assert/strict";
import { test } from "node:test";

import { csvOf, valuesOfGrid } from "../../lflops/page/lib/csv.js";

const cell = (textContent, attributes = {}) => ({ textContent, getAttribute: (name) => attributes[name] ?? null });

test("commas, quotes and line ends are quoted, unknown is empty", () => {
  assert.equal(csvOf([["a,b", 'a "b"', "a\nb", null, 1.5, true]]), '"a,b","a ""b""","a\nb",,1.5,true\r\n');
});

test("a text that a spreadsheet would run gets an apostrophe, a number does not", () => {
  assert.equal(csvOf([["=1+1", "+x", "@x", "-neg", "-5", "-1e-5", -5]]), "'=1+1,'+x,'@x,'-neg,-5,-1e-5,-5\r\n");
});

test("a grid's own values come before what its cells say", () => {
  const rows = [1, 2];
  const exported = { labels: ["n"], values: (row) => [row] };
  assert.deepEqual(valuesOfGrid({ columns: [{ label: "x" }], rows, cells: () => [], exported }), [["n"], [1], [2]]);
});

test("a cell's value is its data, else its title after the label, else its text", () => {
  const columns = ["FLOPs", "FLOPs", "FLOPs", "name", "name", "bytes"].map((label) => ({ label }));
  const cells = () => [
    cell("1.23 M", { title: "FLOPs: 1,234,567" }), cell("–", { title: "FLOPs: unknown" }), cell("1 k", { title: "FLOPs: 1000", "data-value": "1001" }),
    cell("x", { title: "" }), cell(" text "), cell("", { "data-value": "" }),
  ];
  assert.deepEqual(valuesOfGrid({ columns, rows: [0], cells })[1], ["1234567", null, "1001", "(model)", "text", null]);
});
