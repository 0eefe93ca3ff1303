// A table with only the visible rows in the document, so that 20,000 rows scroll like 20. It is a grid for the keyboard and for screen readers:
// arrow keys move, Home and End go to the ends, Enter acts on a row; in a tree, left and right close and open a row.

import { element } from "../lib/dom.js";
import { explanation } from "../lib/explanations.js";
import { exact } from "../lib/format.js";

const ROW = 26;
const BEYOND = 8;

/** @type {WeakMap<Element, Grid>} */
const GRIDS = new WeakMap();

// The grid of a node.
/** @type {(node: Element) => Grid | undefined} */
export function gridOf(node) {
  return GRIDS.get(node);
}

export class Grid {
  /** @type {GridContent} */
  content = { columns: [], rows: [], cells: () => [] };
  chosen = 0;
  isWaiting = false;

  /** @param {string} label */
  constructor(label, role = "treegrid") {
    this.header = element("div", { class: "grid-row grid-header", role: "row", "aria-rowindex": 1 });
    this.body = element("div", { class: "grid-body", role: "rowgroup" });
    this.node = element(
      "div", { class: "grid", role, tabindex: 0, "aria-label": label },
      element("div", { role: "rowgroup", class: "grid-top" }, this.header), this.body,
    );
    GRIDS.set(this.node, this);
    this.node.addEventListener("scroll", () => this.later());
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => this.later());
    this.resized.observe(this.node);
  }

  /** @param {GridContent} content */
  show(content) {
    this.content = content;
    this.chosen = Math.max(Math.min(this.chosen, content.rows.length - 1), 0);
    this.node.setAttribute("aria-rowcount", String(content.rows.length + 1));
    this.node.setAttribute("aria-colcount", String(content.columns.length));
    const others = content.columns.slice(1);
    this.node.style.setProperty("--columns", String(others.length));
    // Columns of words are wider than columns of numbers if there is room.
    this.node.style.setProperty("--widths", others.map(({ kind }) => `minmax(var(--other), ${kind === "words" ? 1.8 : 1}fr)`).join(" "));
    this.body.style.height = `${content.rows.length * ROW}px`;
    const focused = [...this.header.children].findIndex((cell) => cell.contains(document.activeElement));
    this.header.replaceChildren(...content.columns.map((column) => element(
      "div", { role: "columnheader", class: column.kind || null, "aria-sort": column.sort },
      element("button", {
        type: "button", onclick: column.onsort, title: [`sort by ${column.label}`, explanation(column.label)].filter(Boolean).join("\n"),
      }, column.label),
    )));
    this.header.children[focused]?.querySelector("button")?.focus();
    this.draw();
  }

  later() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => { this.isWaiting = false; this.draw(); });
  }

  draw() {
    const { rows } = this.content;
    const first = Math.max(Math.floor(this.node.scrollTop / ROW) - BEYOND, 0);
    const last = Math.min(first + Math.ceil(this.node.clientHeight / ROW) + 2 * BEYOND, rows.length);
    /** @type {HTMLElement[]} */
    const made = [];
    for (let at = first; at < last; at += 1) made.push(this.row(at));
    this.body.replaceChildren(...made);
    this.node.setAttribute("aria-activedescendant", `row-${this.chosen}`);
  }

  /** @param {number} at */
  row(at) {
    const row = this.content.rows[at];
    const { level, isOpen } = this.content;
    const drawn = element("div", {
      class: at === this.chosen ? "grid-row chosen" : "grid-row", role: "row", id: `row-${at}`, style: { top: `${at * ROW}px` },
      "aria-rowindex": at + 2, "aria-level": level ? level(row) : null, "aria-expanded": isOpen ? isOpen(row) : null, "aria-selected": at === this.chosen,
      onclick: () => { this.node.focus({ preventScroll: true }); this.choose(at); },
    });
    drawn.append(...this.content.cells(row));
    return drawn;
  }

  /** @param {number} at */
  choose(at) {
    this.chosen = Math.max(Math.min(at, this.content.rows.length - 1), 0);
    const [top, room] = [this.chosen * ROW, this.node.clientHeight - 2 * ROW];
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    if (top > this.node.scrollTop + room) this.node.scrollTop = top - room;
    this.draw();
    if (this.content.rows.length) this.content.onchoose?.(this.content.rows[this.chosen]);
  }

  // Scroll to a row and choose it, if it is shown.
  /** @param {any} row */
  go(row) {
    const at = this.content.rows.indexOf(row);
    if (at >= 0) this.choose(at);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.key === "Enter" && event.target !== this.node) return; // the key is for a button
    const page = Math.max(Math.floor(this.node.clientHeight / ROW) - 2, 1);
    /** @type {Record<string, number>} */
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const { rows, isOpen, toggle, onenter } = this.content;
    const row = rows[this.chosen];
    const state = isOpen && row !== undefined ? isOpen(row) : null;
    if (event.key in moves) this.choose(this.chosen + moves[event.key]);
    else if (event.key === "ArrowRight" && state === false) toggle?.(row);
    else if (event.key === "ArrowLeft" && state === true) toggle?.(row);
    else if (event.key === "ArrowLeft" && isOpen) this.choose(this.above());
    else if (event.key === "Enter" && state !== null) toggle?.(row);
    else if (event.key === "Enter" && onenter && event.target === this.node) onenter(row);
    else return;
    event.preventDefault();
  }

  // The parent of the chosen row: the nearest row before it that is less deep.
  above() {
    const { rows, level = () => 1 } = this.content;
    let at = this.chosen;
    while (at > 0 && level(rows[at]) >= level(rows[this.chosen])) at -= 1;
    return at;
  }
}

// A cell with a number, and a bar in proportion to the largest number of the column.
/** @type {(column: NumberColumn, row: number) => HTMLElement} */
export function numberCell(column, row) {
  const value = column.read(row);
  const why = value === null && column.reason ? `\n${column.reason(row)}` : "";
  const share = value === null || !column.most ? 0 : Math.min(Number(value) / column.most, 1);
  return element(
    "div", { class: value === null || Number(value) === 0 ? "number nothing" : "number", role: "gridcell", title: `${column.label}: ${exact(value)}${why}` },
    element("span", { class: "bar", style: { width: `${100 * share}%` } }), element("span", { class: "digits" }, column.text(value, row)),
  );
}
