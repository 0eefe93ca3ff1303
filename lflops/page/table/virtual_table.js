// A table of which only the rows on the screen are in the document, so that 20,000 scroll like 20. A grid for the keyboard and for screen
// readers: arrows move, Home and End go to the ends, Enter acts on a row; in a tree left and right close and open it.

import { element } from "../lib/dom.js";

const ROW = 26;
const BEYOND = 8;

const GRIDS = new WeakMap();

// The grid that a node of the document is.
export function gridOf(node) {
  return GRIDS.get(node);
}

// `content` says what there is: columns {label, kind, sort, onsort}, rows and cells(row) as nodes; of a tree level(row), isOpen(row) true, false
// or null, and toggle(row); where somebody listens, onchoose(row) and onenter(row); and `exported`, {labels, values(row)} of a row's exact values,
// where a file is to have others than what the cells say.
export class Grid {
  constructor(label, role = "treegrid") {
    this.chosen = 0;
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

  show(content) {
    this.content = content;
    this.chosen = Math.max(Math.min(this.chosen, content.rows.length - 1), 0);
    this.node.setAttribute("aria-rowcount", content.rows.length + 1);
    this.node.setAttribute("aria-colcount", content.columns.length);
    this.node.style.setProperty("--columns", content.columns.length - 1);
    this.body.style.height = `${content.rows.length * ROW}px`;
    const focused = [...this.header.children].findIndex((cell) => cell.contains(document.activeElement));
    this.header.replaceChildren(...content.columns.map((column) => element(
      "div", { role: "columnheader", class: column.kind || null, "aria-sort": column.sort },
      element("button", { type: "button", onclick: column.onsort, title: `sort by ${column.label}` }, column.label),
    )));
    this.header.children[focused]?.firstChild.focus();
    this.draw();
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    if (!this.content) return;
    const { rows } = this.content;
    const first = Math.max(Math.floor(this.node.scrollTop / ROW) - BEYOND, 0);
    const last = Math.min(first + Math.ceil(this.node.clientHeight / ROW) + 2 * BEYOND, rows.length);
    const made = [];
    for (let at = first; at < last; at += 1) made.push(this.row(at));
    this.body.replaceChildren(...made);
    this.node.setAttribute("aria-activedescendant", `row-${this.chosen}`);
  }

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

  choose(at) {
    this.chosen = Math.max(Math.min(at, this.content.rows.length - 1), 0);
    const [top, room] = [this.chosen * ROW, this.node.clientHeight - 2 * ROW];
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    if (top > this.node.scrollTop + room) this.node.scrollTop = top - room;
    this.draw();
    if (this.content.rows.length) this.content.onchoose?.(this.content.rows[this.chosen]);
  }

  // To a row wherever it is, if it is there.
  go(row) {
    const at = this.content.rows.indexOf(row);
    if (at >= 0) this.choose(at);
  }

  key(event) {
    if (event.key === "Enter" && event.target !== this.node) return; // a button's
    const page = Math.max(Math.floor(this.node.clientHeight / ROW) - 2, 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const { rows, isOpen, toggle, onenter } = this.content;
    const row = rows[this.chosen];
    const state = isOpen && row !== undefined ? isOpen(row) : null;
    if (event.key in moves) this.choose(this.chosen + moves[event.key]);
    else if (event.key === "ArrowRight" && state === false) toggle(row);
    else if (event.key === "ArrowLeft" && state === true) toggle(row);
    else if (event.key === "ArrowLeft" && isOpen) this.choose(this.above());
    else if (event.key === "Enter" && state !== null) toggle(row);
    else if (event.key === "Enter" && onenter && event.target === this.node) onenter(row);
    else return;
    event.preventDefault();
  }

  // The nearest row before the chosen one that is less deep.
  above() {
    const { rows, level } = this.content;
    let at = this.chosen;
    while (at > 0 && level(rows[at]) >= level(rows[this.chosen])) at -= 1;
    return at;
  }
}
