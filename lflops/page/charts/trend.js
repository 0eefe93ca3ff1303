// A figure over the windows of the same run and stage: a line, and how it changed since the window before, in words.

import { element, svg } from "../lib/dom.js";
import { count, duration, percent, rate, size } from "../lib/format.js";

/** @type {Record<string, Format>} */
const TEXTS = { MFU: percent, achieved: rate, step: duration, pass: duration, "peak live memory": size };
const [LONG, HIGH, MARGIN] = [210, 34, 4];

// A window's own `trend` has the figures by their labels. Null where fewer than two windows have this one.
/** @typedef {{ step: number, value: number }} TrendPoint */
/** @type {(label: string, windows: ProfileWindow[], window: ProfileWindow | null) => HTMLElement | null} */
export function trend(label, windows, window) {
  const text = TEXTS[label] ?? count;
  const known = windows
    .filter((each) => window && each.run === window.run && each.tag === window.tag && Number.isFinite(each.trend?.[label]))
    .map((each) => ({ step: Number(each.step), value: each.trend?.[label] ?? 0 }))
    .sort((a, b) => a.step - b.step);
  const here = known.findIndex(({ step }) => step === Number(window?.step));
  if (known.length < 2 || here < 0) return null;
  const [from, to] = [known[0], known[known.length - 1]].map(({ value, step }) => `${text(value)} at step ${step}`);
  const over = `${label} over ${known.length} windows, from ${from} to ${to}`;
  return element("div", { class: "trend" }, sparkline(known, here, over, text), element("div", { class: "remark" }, inWords(known, here)));
}

/** @type {(points: TrendPoint[], here: number, label: string, text: Format) => SVGElement} */
function sparkline(points, here, label, text) {
  const values = points.map(({ value }) => value);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const [from, to] = [points[0].step, points[points.length - 1].step];
  /** @type {(point: TrendPoint) => number} */
  const x = ({ step }) => MARGIN + ((LONG - 2 * MARGIN) * (step - from)) / (to - from || 1);
  /** @type {(point: TrendPoint) => number} */
  const y = ({ value }) => (most === least ? HIGH / 2 : HIGH - MARGIN - ((HIGH - 2 * MARGIN) * (value - least)) / (most - least));
  return svg(
    "svg", { class: "sparkline", viewBox: `0 0 ${LONG} ${HIGH}`, role: "img", "aria-label": label },
    svg("polyline", { points: points.map((point) => `${x(point).toFixed(1)},${y(point).toFixed(1)}`).join(" ") }),
    ...points.map((point, at) => svg(
      "circle", { cx: x(point), cy: y(point), r: at === here ? 3.5 : 3, class: at === here ? "here" : "point" },
      svg("title", {}, `step ${point.step}: ${text(point.value)}`),
    )),
  );
}

/** @type {(points: TrendPoint[], here: number) => string} */
function inWords(points, here) {
  if (here === 0) return `the first of ${points.length} windows`;
  const [before, now] = [points[here - 1], points[here]];
  if (now.value === before.value) return `as at step ${before.step}`;
  if (before.value === 0) return `was 0 at step ${before.step}`;
  return `${percent(Math.abs(now.value / before.value - 1))} ${now.value > before.value ? "more" : "less"} than at step ${before.step}`;
}
