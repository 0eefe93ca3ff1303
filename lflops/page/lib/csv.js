// Tables as CSV: exact values in SI units; an unknown value is an empty cell.

// All rows of a grid in the shown order: the values of `exported`, or else the values of the cells.
/** @type {(content: Pick<GridContent, "columns" | "rows" | "cells" | "exported">) => Value[][]} */
export function valuesOfGrid({ columns, rows, cells, exported }) {
  if (exported) return [exported.labels, ...rows.map(exported.values)];
  const labels = columns.map(({ label }) => label);
  return [labels, ...rows.map((row) => cells(row).map((cell, at) => valueOf(/** @type {Element} */ (cell), labels[at])))];
}

/** @type {(table: HTMLTableElement) => Value[][]} */
export function valuesOfTable(table) {
  const rows = [...table.rows].map((row) => [...row.cells]);
  const labels = rows[0].map((cell) => cell.textContent ?? "");
  return rows.map((cells) => cells.map((cell, at) => valueOf(cell, labels[at])));
}

// The `data-value` of a cell; otherwise its title, which has the exact value after the column's label, or the name.
/** @type {(cell: Element, label: string) => string | null} */
function valueOf(cell, label) {
  const given = cell.getAttribute("data-value");
  if (given !== null) return given === "" ? null : given;
  const title = cell.getAttribute("title");
  if (title === null) return (cell.textContent ?? "").trim();
  const exact = title.startsWith(`${label}: `) ? title.slice(label.length + 2) : title || "(model)";
  if (exact === "unknown") return null;
  return /^-?\d{1,3}(,\d{3})+$/.test(exact) ? exact.replaceAll(",", "") : exact;
}

/** @type {(rows: Value[][]) => string} */
export function csvOf(rows) {
  return rows.map((row) => `${row.map(csvCell).join(",")}\r\n`).join("");
}

// Text that a spreadsheet would read as a formula gets an apostrophe before it.
/** @type {(value: Value) => string} */
function csvCell(value) {
  const text = value === null ? "" : String(value);
  const isNumber = typeof value === "number" || /^[+-]?\d+([.]\d+)?(e[+-]?\d+)?$/.test(text);
  const safe = !isNumber && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
