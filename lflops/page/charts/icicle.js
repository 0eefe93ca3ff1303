// The tree of modules as bars below bars, each as wide as its share of one column; the table has the same in numbers.

import { element } from "../lib/dom.js";

const LEVEL = 20;
const LEVELS = 8;
const NARROWEST = 0.002;

// From `top` downwards; `read` gives a row's value, `choose` is called with the row that is clicked on.
/**
 * @typedef {{
 *   names: string[], below: number[][], kinds: Reader<string>, read: Reader, text: Format, top: number, choose: (row: number) => void,
 * }} IcicleData
 */
/** @type {(data: IcicleData) => HTMLElement} */
export function icicle({ names, below, kinds, read, text, top, choose }) {
  const node = element("div", { class: "icicle", role: "img", "aria-label": `shares of ${names[top] || "the root"}; the table has them in numbers` });
  let deepest = 0;
  /** @type {(row: number, left: number, width: number, level: number) => void} */
  function drawBar(row, left, width, level) {
    deepest = Math.max(deepest, level);
    const label = names[row] === "" ? "(root)" : names[row].slice(names[row].lastIndexOf(".") + 1);
    node.append(element("div", {
      class: "block", title: `${names[row] || "(root)"} ${kinds(row)}: ${text(read(row))}`, onclick: () => choose(row),
      style: { left: `${100 * left}%`, width: `${100 * width}%`, top: `${level * LEVEL}px`, background: `hsl(${hue(kinds(row))} 55% 62%)` },
    }, label));
    if (level + 1 === LEVELS) return;
    const values = below[row].map((child) => Number(read(child) ?? 0));
    const total = Math.max(Number(read(row)), values.reduce((sum, value) => sum + value, 0));
    let start = left;
    below[row].forEach((child, index) => {
      const share = (width * values[index]) / total;
      if (share >= NARROWEST) drawBar(child, start, share, level + 1);
      start += share;
    });
  }
  if (Number(read(top) ?? 0) > 0) drawBar(top, 0, 1, 0);
  node.style.height = `${(deepest + 1) * LEVEL}px`;
  return node;
}

// The same class has the same colour, here and in every other run.
/** @type {(kind: string) => number} */
function hue(kind) {
  let sum = 0;
  for (const letter of kind) sum = (sum * 31 + (letter.codePointAt(0) ?? 0)) % 360;
  return sum;
}
