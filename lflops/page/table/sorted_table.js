// A flat table, sorted by any of its columns; what is unknown comes last.

import { element } from "../lib/dom.js";
import { Grid } from "./virtual_table.js";
import { numberCell } from "../views/modules.js";
import { byName, order } from "./module_rows.js";

// The first column of each row is drawn by `first(row)`. In `state` are `sort` and `down`: without them the most in the column `usual` comes
// first, or where it is not shown the rows are as they are. Rows that are `pinned` stay above all others; `changed()` is called after another
// order was asked for; a grid's listeners are taken too. `show` takes rows, numbers below `size`, and columns {id, label, read(row),
// text(value), hasBar}, of which those without `text` are of words.
export function sheet(label, { size, usual, first, state, changed, pinned = () => false, ...listeners }) {
  const grid = new Grid(label, "grid");
  let [rows, columns] = [[], []];

  function sorting() {
    const found = columns.find(({ id }) => id === state.sort);
    return found ? [found, Boolean(state.down)] : [columns.find(({ id }) => id === usual), true];
  }

  function sortBy(column) {
    const [current, isDown] = sorting();
    Object.assign(state, { sort: column.id, down: current === column ? !isDown : Boolean(column.text) });
    changed();
    draw();
  }

  function comparison(by, isDown) {
    if (by === undefined) return (a, b) => a - b;
    return by.text ? order(by.read, isDown, size) : byName(Array.from({ length: size }, (_, row) => by.read(row) ?? ""), isDown);
  }

  function draw() {
    const [by, isDown] = sorting();
    const compare = comparison(by, isDown);
    const others = columns.slice(1).map((column) => ({ ...column, most: column.hasBar ? most(column, rows) : 0 }));
    grid.show({
      columns: columns.map((column) => ({
        label: column.label, kind: column.text ? "" : "words", onsort: () => sortBy(column),
        sort: column !== by ? "none" : isDown ? "descending" : "ascending",
      })),
      rows: [...rows].sort((a, b) => pinned(b) - pinned(a) || compare(a, b)),
      cells: (row) => [first(row), ...others.map((column) => (column.text ? numberCell(column, row) : wordCell(column.read(row))))],
      ...listeners,
    });
  }

  return { node: grid.node, show: (...given) => { [rows, columns] = given; draw(); } };
}

function most({ read }, rows) {
  return rows.reduce((so, row) => Math.max(so, Number(read(row) ?? 0)), 0);
}

function wordCell(value) {
  return element("div", { class: value === null ? "word nothing" : "word", role: "gridcell", title: value }, value ?? "–");
}
