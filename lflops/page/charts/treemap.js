// A treemap: groups of tiles with areas in proportion to their values. Arrow keys go from tile to tile.

import { element } from "../lib/dom.js";

const HEAD = 18; // height of the name of a group in pixels
const LEAST_NAMED = 44;

/**
 * @typedef {{ label: string, value: number, colour: string, title: string, act?: () => void }} Tile
 * @typedef {{ label: string, value: number, tiles: Tile[] }} Group
 * @typedef {{ left: number, top: number, width: number, height: number }} Box
 */
/** @type {(groups: Group[], width: number, height: number, title: string) => HTMLElement} */
export function treemap(groups, width, height, title) {
  const caption = element("p", { class: "icicle-caption" });
  /** @type {HTMLElement[]} */
  const tiles = [];
  let active = 0;
  const chart = element("div", {
    class: "treemap", role: "listbox", tabindex: 0, "data-chart": title, "aria-label": `${title}; the tables have the numbers`,
    style: { height: `${height}px` }, onkeydown: onKey,
  });
  const sorted = [...groups].filter(({ value }) => value > 0).sort((a, b) => b.value - a.value);
  squarified(sorted.map(({ value }) => value), { left: 0, top: 0, width, height }).forEach((box, at) => {
    const group = sorted[at];
    const hasHead = box.height > 2 * HEAD && box.width > LEAST_NAMED;
    const frame = element("div", { class: "treemap-group", role: "group", "aria-label": group.label, style: placed(box) }, hasHead ? element("div", { class: "treemap-head" }, group.label) : null);
    const inner = { left: 0, top: hasHead ? HEAD : 0, width: box.width - 1, height: box.height - (hasHead ? HEAD : 0) - 1 };
    const parts = [...group.tiles].filter(({ value }) => value > 0).sort((a, b) => b.value - a.value);
    squarified(parts.map(({ value }) => value), inner).forEach((spot, index) => {
      const tile = parts[index];
      const number = tiles.length;
      const node = element("div", {
        class: "tile", role: "option", id: `tile-${number}`, "aria-selected": "false", "aria-label": tile.title, title: tile.title,
        style: { ...placed(spot), background: tile.colour }, onpointerenter: () => point(number), onclick: () => tile.act?.(),
      }, spot.width > LEAST_NAMED && spot.height > 16 ? tile.label : "");
      if (tile.act) node.classList.add("linked");
      tiles.push(node);
      frame.append(node);
    });
    chart.append(frame);
  });

  /** @type {(number: number) => void} */
  function point(number) {
    tiles[active]?.setAttribute("aria-selected", "false");
    active = Math.max(Math.min(number, tiles.length - 1), 0);
    const tile = tiles[active];
    if (!tile) return;
    tile.setAttribute("aria-selected", "true");
    chart.setAttribute("aria-activedescendant", tile.id);
    caption.textContent = tile.title;
  }

  /** @type {(event: KeyboardEvent) => void} */
  function onKey(event) {
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: active + 1, ArrowDown: active + 1, ArrowLeft: active - 1, ArrowUp: active - 1, Home: 0, End: tiles.length - 1 };
    if (event.key === "Enter") tiles[active]?.click();
    else if (event.key in moves) point(moves[event.key]);
    else return;
    event.preventDefault();
  }

  point(0);
  return element("div", {}, caption, chart);
}

/** @type {(box: Box) => Record<string, string>} */
function placed({ left, top, width, height }) {
  return { left: `${left}px`, top: `${top}px`, width: `${Math.max(width - 1, 0)}px`, height: `${Math.max(height - 1, 0)}px` };
}

// Boxes for sorted values, the largest first: rows along the shorter side. A row grows as long as its boxes become more square.
/** @type {(values: number[], box: Box) => Box[]} */
export function squarified(values, box) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const scale = total ? (box.width * box.height) / total : 0;
  /** @type {Box[]} */
  const made = [];
  let { left, top, width, height } = box;
  for (let from = 0; from < values.length;) {
    const side = Math.min(width, height);
    let to = from + 1;
    while (to < values.length && worst(values, from, to + 1, scale, side) <= worst(values, from, to, scale, side)) to += 1;
    const area = scale * values.slice(from, to).reduce((sum, value) => sum + value, 0);
    const thick = side ? area / side : 0;
    let start = 0;
    for (let at = from; at < to; at += 1) {
      const long = thick ? (scale * values[at]) / thick : 0;
      made.push(width >= height ? { left, top: top + start, width: thick, height: long } : { left: left + start, top, width: long, height: thick });
      start += long;
    }
    if (width >= height) [left, width] = [left + thick, Math.max(width - thick, 0)];
    else [top, height] = [top + thick, Math.max(height - thick, 0)];
    from = to;
  }
  return made;
}

// The longer side over the shorter side, of the box that is least square.
/** @type {(values: number[], from: number, to: number, scale: number, side: number) => number} */
function worst(values, from, to, scale, side) {
  const areas = values.slice(from, to).map((value) => scale * value);
  const sum = areas.reduce((all, area) => all + area, 0);
  const [least, most] = [Math.min(...areas), Math.max(...areas)];
  return Math.max((side * side * most) / (sum * sum), (sum * sum) / (side * side * least));
}
