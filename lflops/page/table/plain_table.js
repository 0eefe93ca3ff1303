// A table without scrolling and sorting; all its rows are in the document.

import { element } from "../lib/dom.js";
import { exact, size } from "../lib/format.js";

// The label of a column, and whether it has amounts, which are aligned to the right. Exact values of cells are kept for files.
/** @typedef {{ label: string, isAmount?: boolean }} PlainColumn */
/** @type {(label: string, columns: PlainColumn[], rows: (HTMLElement | string)[][]) => HTMLElement} */
export function plainTable(label, columns, rows) {
  /** @type {(tag: "th" | "td") => (content: HTMLElement | string, at: number) => HTMLElement} */
  const cell = (tag) => (content, at) => element(
    tag, { class: columns[at].isAmount ? "amount" : null, "data-value": content instanceof HTMLElement ? content.dataset.value ?? null : null }, content,
  );
  return element(
    "table", { class: "plain-table", "aria-label": label },
    element("thead", {}, element("tr", {}, ...columns.map((column) => column.label).map(cell("th")))),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map(cell("td"))))),
  );
}

// A value as text; the exact value is kept for files.
/** @type {(value: Count, text: Format, title?: string | null) => HTMLElement} */
export function valued(value, text, title = null) {
  return element("span", { title, "data-value": value ?? "" }, text(value));
}

/** @type {(bytes: Count) => HTMLElement} */
export function bytesOf(bytes) {
  return valued(bytes, size, `${exact(bytes)} bytes`);
}

/** @type {(...labels: string[]) => PlainColumn[]} */
export function texts(...labels) {
  return labels.map((label) => ({ label }));
}

/** @type {(...labels: string[]) => PlainColumn[]} */
export function amounts(...labels) {
  return labels.map((label) => ({ label, isAmount: true }));
}
