// A flat table that can be sorted by each column; unknown values come last.

import { element } from "../lib/dom.js";
import { Grid, numberCell } from "./virtual_table.js";
import { byName, order } from "./module_rows.js";

// The first column of each row is drawn by `first(row)`. In `state` are `sort` and `down`: without them the largest in the column `usual`
// comes first; without that column the rows keep their order. Rows that are `pinned` stay above all others; `changed()` is called when the
// user sorts; a grid's listeners are taken too. `show` takes rows, which are below `size`, and columns.
/**
 * @typedef {{
 *   size: number, usual: string, first: (row: number) => Node, state: State, changed: () => void, pinned?: (row: number) => boolean,
 *   onchoose?: (row: number) => void, onenter?: (row: number) => void,
 * }} Options
 */
/** @type {(label: string, options: Options) => { node: HTMLElement, show(rows: number[], columns: FlatColumn[], size?: number): void, go(row: number): void }} */
export function sortedTable(label, { size, usual, first, state, changed, pinned = () => false, ...listeners }) {
  const grid = new Grid(label, "grid");
  /** @type {number[]} */
  let rows = [];
  /** @type {FlatColumn[]} */
  let columns = [];

  /** @type {() => [FlatColumn | undefined, boolean]} */
  function sorting() {
    const column = columns.find(({ id }) => id === state.sort);
    return column ? [column, Boolean(state.down)] : [columns.find(({ id }) => id === usual), true];
  }

  /** @type {(column: FlatColumn) => void} */
  function sortBy(column) {
    const [current, isDown] = sorting();
    Object.assign(state, { sort: column.id, down: current === column ? !isDown : Boolean(column.text) });
    changed();
    draw();
  }

  /** @type {(by: FlatColumn | undefined, isDown: boolean) => Order} */
  function comparison(by, isDown) {
    if (by === undefined) return (a, b) => a - b;
    return by.text ? order(by.read, isDown, size) : byName(Array.from({ length: size }, (_, row) => by.read(row) ?? ""), isDown);
  }

  function draw() {
    const [by, isDown] = sorting();
    const compare = comparison(by, isDown);
    const others = columns.slice(1).map((column) => ({ ...column, most: column.hasBar ? largest(column, rows) : 0 }));
    grid.show({
      columns: columns.map((column) => ({
        label: column.label, kind: column.text ? "" : "words", onsort: () => sortBy(column),
        sort: column !== by ? "none" : isDown ? "descending" : "ascending",
      })),
      rows: [...rows].sort((a, b) => Number(pinned(b)) - Number(pinned(a)) || (compare ? compare(a, b) : 0)),
      cells: (row) => [
        first(row),
        ...others.map(({ text, ...column }) => (text ? numberCell({ ...column, text }, row) : wordCell(column.read(row)))),
      ],
      ...listeners,
    });
  }

  return { node: grid.node, show: (given, shown, many = size) => { [rows, columns, size] = [given, shown, many]; draw(); }, go: (row) => grid.go(row) };
}

/** @type {(column: FlatColumn, rows: number[]) => number} */
function largest({ read }, rows) {
  return rows.reduce((so, row) => Math.max(so, Number(read(row) ?? 0)), 0);
}

/** @type {(value: string | null) => HTMLElement} */
function wordCell(value) {
  return element("div", { class: value === null ? "word nothing" : "word", role: "gridcell", title: value }, value ?? "–");
}
