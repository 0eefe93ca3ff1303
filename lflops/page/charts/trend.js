// A figure over the windows of a run and stage: the means as a line, the quartiles as a band, and the change since the window before in words.

import { element, svg } from "../lib/dom.js";
import { count, duration, ofPeak, perSecond, percent, rate, size } from "../lib/format.js";
import { windowStep } from "../lib/windows.js";

/** @type {Record<string, Format>} */
const TEXTS = { MFU: ofPeak, achieved: rate, step: duration, pass: duration, data: duration, "peak live memory": size, "samples/s": perSecond, "tokens/s": perSecond };
const [WIDTH, HEIGHT] = [280, 92];
const [LEFT, RIGHT, TOP, BOTTOM] = [72, 8, 8, 20];
const BAND = "the line shows the mean of the unprofiled steps of each window; the band contains half of these steps";

// The `head` of a window has the figures by their names. Null if fewer than two windows have the figure.
/** @typedef {{ step: number, value: number, range: [number, number] | null }} TrendPoint */
/** @type {(label: string, windows: ProfileWindow[], window: ProfileWindow | null) => HTMLElement | null} */
export function trend(label, windows, window) {
  const text = TEXTS[label] ?? count;
  const known = windows
    .filter((each) => window && each.run === window.run && each.tag === window.tag && Number.isFinite(each.head?.figures[label]))
    .map((each) => ({ step: Number(windowStep(each, windows)), value: each.head?.figures[label] ?? 0, range: each.head?.ranges[label] ?? null }))
    .sort((a, b) => a.step - b.step);
  const here = window ? known.findIndex(({ step }) => step === Number(windowStep(window, windows))) : -1;
  if (known.length < 2 || here < 0) return null;
  const [from, to] = [known[0], known[known.length - 1]].map(({ value, step }) => `${text(value)} at step ${step}`);
  const over = `${label} over ${known.length} windows, from ${from} to ${to}`;
  return element("div", { class: "trend" }, chart(known, here, over, text), element("div", { class: "remark" }, inWords(known, here)));
}

/** @type {(points: TrendPoint[], here: number, label: string, text: Format) => SVGElement} */
function chart(points, here, label, text) {
  const ends = points.flatMap(({ value, range }) => [value, ...(range ?? [])]);
  const [least, most] = [ends.reduce((a, b) => Math.min(a, b)), ends.reduce((a, b) => Math.max(a, b))];
  const [from, to] = [points[0].step, points[points.length - 1].step];
  /** @type {(point: TrendPoint) => number} */
  const x = ({ step }) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - from)) / (to - from || 1);
  /** @type {(value: number) => number} */
  const y = (value) => (most === least ? (TOP + HEIGHT - BOTTOM) / 2 : HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * (value - least)) / (most - least));
  const banded = points.filter(({ range }) => range);
  /** @type {(side: 0 | 1) => string[]} */
  const edge = (side) => banded.map((point) => `${x(point).toFixed(1)},${y(point.range?.[side] ?? point.value).toFixed(1)}`);
  /** @type {(value: number) => SVGElement} */
  const tick = (value) => svg("g", { class: "tick" },
    svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, text === ofPeak ? percent(value) : text(value)));
  const isHidden = points.length > 60;
  return svg(
    "svg", { class: "trend-chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    ...(most === least ? [tick(least)] : [tick(least), tick(most)]),
    svg("text", { class: "tick-label", x: LEFT, y: HEIGHT - 4 }, `step ${from}`),
    svg("text", { class: "tick-label", x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, String(to)),
    banded.length > 1 ? svg("polygon", { class: "band", points: [...edge(0), ...edge(1).reverse()].join(" ") }, svg("title", {}, BAND)) : null,
    svg("polyline", { points: points.map((point) => `${x(point).toFixed(1)},${y(point.value).toFixed(1)}`).join(" ") }),
    ...points.map((point, at) => svg(
      "circle", { cx: x(point), cy: y(point.value), r: at === here ? 4 : isHidden ? 1.5 : 2.5, class: at === here ? "here" : "point" },
      svg("title", {}, `step ${point.step}: ${text(point.value)}`),
    )),
  );
}

/** @type {(points: TrendPoint[], here: number) => string} */
function inWords(points, here) {
  if (here === 0) return `the first of ${points.length} windows`;
  const [before, now] = [points[here - 1], points[here]];
  if (now.value === before.value) return `unchanged since step ${before.step}`;
  if (before.value === 0) return `was 0 at step ${before.step}`;
  return `${percent(Math.abs(now.value / before.value - 1))} ${now.value > before.value ? "more" : "less"} than at step ${before.step}`;
}
