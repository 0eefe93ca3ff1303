// The drawing of a roofline: intensity to the right and FLOP/s upwards, both by powers of ten; the roofs, and the points below them.

import { svg } from "../lib/dom.js";
import { bandwidth, decade, exact, rate } from "../lib/format.js";

const [WIDTH, HEIGHT] = [1240, 420];
const [LEFT, RIGHT, TOP, BOTTOM] = [92, 1090, 14, 372];
const [LARGEST, SMALLEST] = [20, 3];
const [NAMED, LETTER, LINE] = [6, 6.2, 14];
const TICKS = 10;

// `pointed` is called with the point that the pointer is on, or null, and `chosen` with the one that is clicked on. Returns the node, and the
// circles by point.
/**
 * @typedef {{
 *   points: RooflinePoint[], ceilings: Ceiling[], label: string, pointed: (point: RooflinePoint | null) => void,
 *   chosen: (point: RooflinePoint) => void,
 * }} RooflineData
 */
/** @type {(data: RooflineData) => { node: SVGElement, circles: Map<RooflinePoint, SVGElement> }} */
export function drawRoofline({ points, ceilings, label, pointed, chosen }) {
  const judging = ceilings.filter((ceiling) => ceiling.is_judged_by);
  const turning = ceilings.filter((each) => each.bandwidth_bytes_per_second);
  const ridges = turning.map((each) => each.flops_per_second / Number(each.bandwidth_bytes_per_second));
  const x = logScale([...points.map(({ intensity }) => intensity), ...ridges], LEFT, RIGHT);
  const y = logScale([...points.map(({ height }) => height), ...ceilings.map((each) => each.flops_per_second)], BOTTOM, TOP);
  const longest = Math.max(...points.map(({ weight }) => weight), 0);
  const circles = new Map();
  const drawn = [...points].sort((a, b) => b.weight - a.weight).map((point) => {
    const [cx, cy, r] = [x.at(point.intensity), y.at(point.height), radius(point.weight, longest)];
    const circle = svg("circle", {
      class: point.isTimed ? "point timed" : "point reachable", cx, cy, r, style: { color: `var(--phase-${point.phase})` },
      onpointerenter: () => pointed(point), onpointerleave: () => pointed(null), onclick: () => chosen(point),
    });
    circles.set(point, circle);
    return point.over ? [svg("circle", { class: "ring", cx, cy, r: r + 4 }), circle] : [circle];
  });
  const node = svg(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    svg("clipPath", { id: "below-the-roofs" }, svg("rect", { x: LEFT, y: TOP, width: RIGHT - LEFT, height: BOTTOM - TOP })),
    ...axes(x, y),
    svg("g", { "clip-path": "url(#below-the-roofs)" }, ...ceilings.map((ceiling) => roofLine(ceiling, x, y)).reverse()),
    ...peakLabels(ceilings, y), ...drawn.flat(), ...slopeLabels(judging, x, y), ...pointLabels(points, x, y, longest),
  );
  return { node, circles };
}

// A scale over all values, with room at both ends, and at least two decades.
/** @type {(values: number[], start: number, end: number) => Scale} */
function logScale(values, start, end) {
  const logs = values.map((value) => Math.log10(value));
  let [low, high] = logs.length ? [Math.min(...logs) - 0.3, Math.max(...logs) + 0.3] : [-1, 3];
  const missing = Math.max(2 - (high - low), 0) / 2;
  [low, high] = [low - missing, high + missing];
  const each = Math.max(Math.ceil((high - low) / TICKS), 1);
  /** @type {number[]} */
  const powers = [];
  for (let power = Math.ceil(low / each) * each; power <= high; power += each) powers.push(power);
  /** @type {(value: number) => number} */
  const at = (value) => start + ((Math.log10(value) - low) / (high - low)) * (end - start);
  return { at, powers, low: 10 ** low, high: 10 ** high };
}

/** @type {(weight: number, longest: number) => number} */
function radius(weight, longest) {
  return longest ? Math.max(LARGEST * Math.sqrt(weight / longest), SMALLEST) : SMALLEST;
}

/** @type {(x: Scale, y: Scale) => SVGElement[]} */
function axes(x, y) {
  /** @type {(x1: number, y1: number, x2: number, y2: number) => SVGElement} */
  const line = (x1, y1, x2, y2) => svg("line", { class: "grid-line", x1, y1, x2, y2 });
  /** @type {(attributes: Record<string, any>, content: string) => SVGElement} */
  const text = (attributes, content) => svg("text", { class: "tick", ...attributes }, content);
  return [
    ...x.powers.map((power) => line(x.at(10 ** power), TOP, x.at(10 ** power), BOTTOM)),
    ...y.powers.map((power) => line(LEFT, y.at(10 ** power), RIGHT, y.at(10 ** power))),
    svg("rect", { class: "frame", x: LEFT, y: TOP, width: RIGHT - LEFT, height: BOTTOM - TOP }),
    ...x.powers.map((power) => text({ x: x.at(10 ** power), y: BOTTOM + 18, "text-anchor": "middle" }, decade(power))),
    ...y.powers.map((power) => text({ x: LEFT - 8, y: y.at(10 ** power) + 4, "text-anchor": "end" }, decade(power, "FLOP/s"))),
    svg("text", { class: "axis", x: (LEFT + RIGHT) / 2, y: BOTTOM + 40, "text-anchor": "middle" }, "intensity, FLOPs per byte moved"),
  ];
}

/** @type {(ceiling: Ceiling, x: Scale, y: Scale) => SVGElement} */
function roofLine({ hardware, source, dtype, flops_per_second: peak, bandwidth_bytes_per_second: slope, is_judged_by: isJudgedBy }, x, y) {
  const ridge = slope ? Math.min(Math.max(peak / slope, x.low), x.high) : x.low;
  const corners = [x.low, ridge, x.high].map((right) => [right, slope ? Math.min(peak, slope * right) : peak]);
  return svg(
    "polyline", { class: isJudgedBy ? "roof" : "roof other", points: corners.map(([right, up]) => `${x.at(right)},${y.at(up)}`).join(" ") },
    svg("title", {}, `${hardware}, ${dtype}: ${rate(peak)}, ${bandwidth(slope)}${source ? ` (${source})` : ""}`),
  );
}

// The peaks to the right of the roofs, moved where they are too close.
/** @type {(ceilings: Ceiling[], y: Scale) => SVGElement[]} */
function peakLabels(ceilings, y) {
  let last = -Infinity;
  return [...ceilings].sort((a, b) => b.flops_per_second - a.flops_per_second).flatMap((ceiling) => {
    const roof = y.at(ceiling.flops_per_second);
    last = Math.max(last + LINE, roof);
    return [
      svg("polyline", { class: "leader", points: `${RIGHT},${roof} ${RIGHT + 5},${roof} ${RIGHT + 10},${last}` }),
      svg(
        "text", { class: ceiling.is_judged_by ? "roof-label" : "roof-label other", x: RIGHT + 14, y: last + 4 },
        `${ceiling.dtype} ${rate(ceiling.flops_per_second)}`, svg("title", {}, `${ceiling.hardware}: ${exact(ceiling.flops_per_second)} FLOP/s`),
      ),
    ];
  });
}

// The bandwidth along the slope of the chip that is judged by, where there is room for it.
/** @type {(judging: Ceiling[], x: Scale, y: Scale) => SVGElement[]} */
function slopeLabels(judging, x, y) {
  const highest = Math.max(...judging.map((each) => each.flops_per_second));
  const ceiling = judging.find((each) => each.flops_per_second === highest);
  const slope = ceiling?.bandwidth_bytes_per_second;
  if (!slope) return [];
  const [from, to] = [Math.max(x.low, y.low / slope), Math.min(highest / slope, x.high)];
  const [x1, y1, x2, y2] = [x.at(from), y.at(slope * from), x.at(to), y.at(slope * to)];
  if (Math.hypot(x2 - x1, y2 - y1) < 160) return [];
  const [middle, height] = [(x1 + x2) / 2, (y1 + y2) / 2];
  const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  return [svg(
    "text", { class: "roof-label", "text-anchor": "middle", transform: `translate(${middle} ${height}) rotate(${angle}) translate(0 -7)` },
    bandwidth(slope),
  )];
}

// The names of the points with the most to win, or the most time, as long as the labels do not overlap.
/** @type {(points: RooflinePoint[], x: Scale, y: Scale, longest: number) => SVGElement[]} */
function pointLabels(points, x, y, longest) {
  /** @type {[number, number, number][]} */
  const taken = [];
  /** @type {SVGElement[]} */
  const made = [];
  /** @type {(point: RooflinePoint) => number} */
  const worth = points.some(({ toWin }) => toWin) ? ({ toWin }) => toWin : ({ weight }) => weight;
  for (const point of [...points].sort((a, b) => worth(b) - worth(a))) {
    if (made.length === NAMED || !worth(point)) break;
    const [width, right] = [point.label.length * LETTER, x.at(point.intensity) + radius(point.weight, longest) + 4];
    const isBefore = right + width > RIGHT;
    const left = isBefore ? x.at(point.intensity) - radius(point.weight, longest) - 4 - width : right;
    const top = y.at(point.height) - LINE / 2;
    if (left < LEFT || taken.some(([l, r, t]) => left < r && left + width > l && Math.abs(top - t) < LINE)) continue;
    taken.push([left, left + width, top]);
    made.push(svg("text", {
      class: "point-label", x: isBefore ? left + width : left, y: top + LINE / 2 + 4, "text-anchor": isBefore ? "end" : "start",
    }, point.label));
  }
  return made;
}
