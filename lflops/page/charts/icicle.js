// The tree of modules as bars below bars, each as wide as its share of its parent. Clicks, the wheel and the keyboard zoom. The table below has
// the numbers.

import { hashOf } from "../lib/colours.js";
import { element } from "../lib/dom.js";

const LEVEL = 22;
const LEVELS = 9;
const NARROWEST = 0.0025;
const PALETTE = 11; // the colours --class-0, --class-1 and so on
const OTHER = "var(--rest)";
const LISTED = 12; // classes in the legend
const WHEEL = 60; // turn of the wheel for one level

/**
 * `below` has the rows below each row, `label` the short name of a row, `full` its whole name, `read` its value, `describe` a line about it, `top`
 * the widest row, and `above` its parents. `colour` returns a CSS background. `isFound` says whether a search found a row, or is null. `zoom` is
 * called with the next top row, `choose` with a row that is clicked or entered.
 * @typedef {{
 *   below: number[][], label: Reader<string>, full: Reader<string>, read: Reader, describe: Reader<string>, top: number, above: number[],
 *   colour: Reader<string>, isFound: Reader<boolean> | null, zoom: (row: number) => void, choose: (row: number) => void, legend: HTMLElement, title: string,
 * }} IcicleData
 * @typedef {{ row: number, node: HTMLElement, above: Bar | null, below: Bar[] }} Bar
 */
/** @type {(data: IcicleData) => HTMLElement} */
export function icicle({ below, label, full, read, describe, top, above, colour, isFound, zoom, choose, legend, title }) {
  const caption = element("p", { class: "icicle-caption", "aria-live": "off" });
  const chart = element("div", {
    class: "icicle", role: "tree", tabindex: 0, "data-chart": title, "aria-label": `${title}; the table has the numbers`,
    onkeydown: onKey, onwheel: onWheel, onpointerleave: () => point(bars[0] ?? null),
  });
  /** @type {Bar[]} */
  const bars = [];
  let active = 0;
  let deepest = 0;
  let turned = 0;

  /** @type {(row: number, left: number, width: number, level: number, parent: Bar | null) => void} */
  function drawBar(row, left, width, level, parent) {
    deepest = Math.max(deepest, level);
    const found = isFound === null ? "" : isFound(row) ? " found" : " dimmed";
    /** @type {Bar} */
    const bar = { row, above: parent, below: [], node: element("div", {
      class: `block${found}`, role: "treeitem", "aria-level": level + 1, "aria-selected": "false", id: `bar-${bars.length}`, "aria-label": describe(row),
      onclick: () => { point(bar); choose(row); }, onpointerenter: () => point(bar),
      style: { left: `${100 * left}%`, width: `${100 * width}%`, top: `${level * LEVEL}px`, background: colour(row) },
    }, width > 0.02 ? label(row) : "") };
    bars.push(bar);
    parent?.below.push(bar);
    chart.append(bar.node);
    if (level + 1 === LEVELS) return;
    const values = below[row].map((child) => Number(read(child) ?? 0));
    const total = Math.max(Number(read(row)), values.reduce((sum, value) => sum + value, 0));
    let start = left;
    const order = below[row].map((_, at) => at).sort((a, b) => values[b] - values[a]);
    let [small, hidden] = [0, 0];
    for (const at of order) {
      const share = total ? (width * values[at]) / total : 0;
      if (share >= NARROWEST) {
        drawBar(below[row][at], start, share, level + 1, bar);
        start += share;
      } else if (share > 0) {
        small += share;
        hidden += 1;
      }
    }
    if (small >= NARROWEST) {
      deepest = Math.max(deepest, level + 1);
      chart.append(element("div", {
        class: "block rest", title: `${hidden} smaller modules`, "aria-hidden": "true",
        style: { left: `${100 * start}%`, width: `${100 * small}%`, top: `${(level + 1) * LEVEL}px` },
      }));
    }
  }

  /** @type {(bar: Bar | null) => void} */
  function point(bar) {
    if (bar === null) return;
    bars[active]?.node.setAttribute("aria-selected", "false");
    active = bars.indexOf(bar);
    bar.node.setAttribute("aria-selected", "true");
    chart.setAttribute("aria-activedescendant", bar.node.id);
    caption.textContent = describe(bar.row);
  }

  /** @type {(event: KeyboardEvent) => void} */
  function onKey(event) {
    const bar = bars[active];
    if (!bar) return;
    const siblings = bar.above ? bar.above.below : [bar];
    const at = siblings.indexOf(bar);
    /** @type {Record<string, Bar | null | undefined>} */
    const moves = {
      ArrowDown: bar.below[0], ArrowUp: bar.above, ArrowRight: siblings[at + 1], ArrowLeft: siblings[at - 1], Home: bars[0], End: siblings.at(-1),
    };
    if (event.key in moves) point(moves[event.key] ?? null);
    else if (event.key === "Enter") choose(bar.row);
    else if (event.key === "+" || event.key === " ") zoom(bar.row);
    else if ((event.key === "-" || event.key === "Backspace") && above.length) zoom(above[above.length - 1]);
    else return;
    event.preventDefault();
  }

  // Turning the wheel up goes one level towards the bar below the pointer; turning it down goes one level back.
  /** @type {(event: WheelEvent) => void} */
  function onWheel(event) {
    if (event.shiftKey || Math.abs(event.deltaY) < Math.abs(event.deltaX)) return;
    const isIn = event.deltaY < 0;
    let bar = bars.find(({ node }) => node === event.target) ?? null;
    while (bar && bar.above && bar.above !== bars[0]) bar = bar.above;
    const next = isIn ? (bar && bar.row !== top ? bar.row : null) : above.at(-1) ?? null;
    if (next === null) return;
    event.preventDefault();
    turned += Math.abs(event.deltaY);
    if (turned >= WHEEL) zoom(next);
  }

  if (Number(read(top) ?? 0) > 0) drawBar(top, 0, 1, 0, null);
  chart.style.height = `${(deepest + 1) * LEVEL}px`;
  point(bars[0] ?? null);
  const path = element("nav", { class: "crumbs", "aria-label": "zoomed to" }, ...above.flatMap((row) => [
    element("button", { type: "button", class: "leading", onclick: () => zoom(row) }, label(row)), " › ",
  ]), element("b", {}, above.length ? label(top) : full(top)));
  return element("div", { class: "icicle-frame" }, element("div", { class: "icicle-head" }, path, caption, legend), chart);
}

// A background for each class, in this order. Each class has its own, plain or striped, until the palette is used up; the rest is grey. A class has
// the same colour in every run, unless an earlier class has it.
/** @type {(kinds: string[]) => Map<string, string>} */
export function looksOfClasses(kinds) {
  /** @type {Map<string, string>} */
  const looks = new Map();
  /** @type {Set<number>} */
  const taken = new Set();
  for (const kind of kinds) {
    if (looks.has(kind)) continue;
    const first = taken.size < PALETTE ? 0 : PALETTE;
    if (taken.size === 2 * PALETTE) { looks.set(kind, OTHER); continue; }
    let place = hashOf(kind) % PALETTE;
    while (taken.has(first + place)) place = (place + 1) % PALETTE;
    taken.add(first + place);
    const colour = `var(--class-${place})`;
    looks.set(kind, first ? `repeating-linear-gradient(135deg, ${colour} 0 5px, color-mix(in oklab, ${colour} 55%, white) 5px 9px)` : colour);
  }
  return looks;
}

// The colour of an MFU: low is warm, high is green, unknown is grey.
/** @type {(share: number | null) => string} */
export function colourOfShare(share) {
  if (share === null) return "var(--rest)";
  return `color-mix(in oklab, var(--efficient) ${Math.round(100 * Math.min(share / 0.6, 1))}%, var(--inefficient))`;
}

/** @type {(kinds: string[], looks: Map<string, string>) => HTMLElement} */
export function legendOfClasses(kinds, looks) {
  const [listed, others] = [kinds.slice(0, LISTED), kinds.slice(LISTED)];
  return element(
    "ul", { class: "legend" },
    ...listed.map((kind) => element("li", {}, element("span", { class: "key", style: { background: looks.get(kind) ?? OTHER } }), kind)),
    others.length ? element("li", { class: "quiet", title: others.join(", ") }, `${others.length} more`) : null,
  );
}

/** @type {() => HTMLElement} */
export function legendOfShares() {
  return element("div", { class: "legend scale" }, "share of peak 0 %", element("span", { class: "share-scale", "aria-hidden": "true" }), "60 % or more");
}
