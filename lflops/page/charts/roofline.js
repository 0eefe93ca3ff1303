// The chart of a roofline: FLOP/s over intensity, both on logarithmic axes, with the rooflines and the points below them.

import { colourOfPart } from "../lib/colours.js";
import { svg } from "../lib/dom.js";
import { bandwidth, exact, rate, tick } from "../lib/format.js";

const HEIGHT = 440;
const [LEFT, TOP, BOTTOM] = [92, 14, 380];
const RUG = 9; // pixels of a mark on the axis, for a point whose height is unknown
const [ROOM_FOR_PEAKS, NARROW] = [150, 600];
const [LARGEST, SMALLEST] = [20, 3];
const [NAMED, LETTER, LINE] = [8, 6.6, 15];
const TICKS = 10;

// `pointed` is called with the point below the pointer, or null; `chosen` with a point that is clicked; `zoomed` with the corners of a rectangle
// that was dragged. A point without a height is a mark on the axis. Returns the node, and the element of each point.
/**
 * @typedef {{ x: [number, number], y: [number, number] }} Zoom
 * @typedef {{
 *   points: RooflinePoint[], ceilings: Ceiling[], label: string, width: number, zoom: Zoom | null, pointed: (point: RooflinePoint | null) => void,
 *   chosen: (point: RooflinePoint) => void, zoomed: (zoom: Zoom) => void,
 * }} RooflineData
 */
/** @type {(data: RooflineData) => { node: SVGElement, circles: Map<RooflinePoint, SVGElement> }} */
export function drawRoofline({ points: all, ceilings, label, width: WIDTH, zoom, pointed, chosen, zoomed }) {
  const RIGHT = WIDTH - (WIDTH < NARROW ? 8 : ROOM_FOR_PEAKS);
  const points = all.filter(({ height }) => height > 0);
  const judging = ceilings.filter((ceiling) => ceiling.is_reference);
  const turning = ceilings.filter((each) => each.bandwidth_bytes_per_second);
  const ridges = turning.map((each) => each.flops_per_second / Number(each.bandwidth_bytes_per_second));
  const x = zoom ? scaleOver(zoom.x, LEFT, RIGHT) : logScale([...all.map(({ intensity }) => intensity), ...ridges], LEFT, RIGHT);
  const y = zoom ? scaleOver(zoom.y, BOTTOM, TOP) : logScale([...points.map(({ height }) => height), ...ceilings.map((each) => each.flops_per_second)], BOTTOM, TOP);
  const longest = Math.max(...points.map(({ weight }) => weight), 0);
  const circles = new Map();
  const drawn = [...points].sort((a, b) => b.weight - a.weight).map((point) => {
    const [cx, cy, r] = [x.at(point.intensity), y.at(point.height), radius(point.weight, longest)];
    const circle = svg("circle", {
      class: "point timed", cx, cy, r, style: { color: colourOfPart(point.phase) },
      onpointerenter: () => pointed(point), onpointerleave: () => pointed(null), onclick: () => chosen(point),
    });
    circles.set(point, circle);
    return point.over ? [svg("circle", { class: "ring", cx, cy, r: r + 4 }), circle] : [circle];
  });
  const marks = all.filter(({ height }) => !(height > 0)).map((point) => {
    const at = x.at(point.intensity);
    const mark = svg("line", {
      class: "point rug", x1: at, x2: at, y1: BOTTOM - RUG, y2: BOTTOM, style: { color: colourOfPart(point.phase) },
      onpointerenter: () => pointed(point), onpointerleave: () => pointed(null), onclick: () => chosen(point),
    });
    circles.set(point, mark);
    return mark;
  });
  const brush = svg("rect", { class: "brush", visibility: "hidden" });
  const node = svg(
    "svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", "aria-label": label,
      onpointerdown: (/** @type {PointerEvent} */ event) => drag(event, node, brush, { x, y, RIGHT }, zoomed),
    },
    svg("clipPath", { id: "below-the-roofs" }, svg("rect", { x: LEFT, y: TOP, width: RIGHT - LEFT, height: BOTTOM - TOP })),
    ...axes(x, y, RIGHT),
    svg("g", { "clip-path": "url(#below-the-roofs)" }, ...ceilings.map((ceiling) => roofLine(ceiling, x, y)).reverse()),
    svg("g", { "clip-path": "url(#below-the-roofs)" }, ...drawn.flat(), ...marks),
    ...peakLabels(ceilings, y, RIGHT, WIDTH < NARROW), ...slopeLabels(judging, x, y), ...pointLabels(points, x, y, longest, RIGHT), brush,
  );
  return { node, circles };
}

// Drag a rectangle; when the pointer is released, pass the values at its corners.
/** @type {(event: PointerEvent, node: SVGElement, brush: SVGElement, scales: { x: Scale, y: Scale, RIGHT: number }, zoomed: (zoom: Zoom) => void) => void} */
function drag(event, node, brush, { x, y, RIGHT }, zoomed) {
  const box = node.getBoundingClientRect();
  /** @type {(each: PointerEvent) => [number, number]} */
  const place = (each) => [
    Math.min(Math.max(each.clientX - box.left, LEFT), RIGHT), Math.min(Math.max(each.clientY - box.top, TOP), BOTTOM),
  ];
  const [startX, startY] = place(event);
  let [endX, endY] = [startX, startY];
  /** @type {(each: PointerEvent) => void} */
  const move = (each) => {
    [endX, endY] = place(each);
    const attributes = { x: Math.min(startX, endX), y: Math.min(startY, endY), width: Math.abs(endX - startX), height: Math.abs(endY - startY) };
    for (const [name, value] of Object.entries(attributes)) brush.setAttribute(name, String(value));
    brush.setAttribute("visibility", "visible");
  };
  const end = () => {
    window.removeEventListener("pointermove", move);
    brush.setAttribute("visibility", "hidden");
    if (Math.abs(endX - startX) < 12 || Math.abs(endY - startY) < 12) return;
    zoomed({
      x: [x.value(Math.min(startX, endX)), x.value(Math.max(startX, endX))], y: [y.value(Math.max(startY, endY)), y.value(Math.min(startY, endY))],
    });
  };
  window.addEventListener("pointermove", move);
  window.addEventListener("pointerup", end, { once: true });
}

// A scale over all values, with room at both ends, and at least two decades.
/** @type {(values: number[], start: number, end: number) => Scale} */
function logScale(values, start, end) {
  const logs = values.map((value) => Math.log10(value));
  let [low, high] = logs.length ? [Math.min(...logs) - 0.3, Math.max(...logs) + 0.3] : [-1, 3];
  const missing = Math.max(2 - (high - low), 0) / 2;
  return scaleOver([10 ** (low - missing), 10 ** (high + missing)], start, end);
}

/** @type {(ends: [number, number], start: number, end: number) => Scale} */
function scaleOver(ends, start, end) {
  const [low, high] = ends.map((value) => Math.log10(value));
  /** @type {(value: number) => number} */
  const at = (value) => start + ((Math.log10(value) - low) / (high - low)) * (end - start);
  /** @type {(place: number) => number} */
  const value = (place) => 10 ** (low + ((place - start) / (end - start)) * (high - low));
  return { at, value, ticks: ticksOver(low, high), low: 10 ** low, high: 10 ** high };
}

// The labelled values of an axis: powers of ten; on a zoomed axis also 2 and 5 times these, or steps of equal length.
/** @type {(low: number, high: number) => number[]} */
function ticksOver(low, high) {
  const [from, to, decades] = [10 ** low, 10 ** high, high - low];
  /** @type {number[]} */
  const made = [];
  if (decades >= 0.9) {
    const each = Math.max(Math.ceil(decades / TICKS), 1);
    for (let power = Math.floor(low / each) * each; power <= high; power += each) made.push(...(decades < 2 ? [1, 2, 5] : [1]).map((digit) => digit * 10 ** power));
  } else {
    const power = 10 ** Math.floor(Math.log10((to - from) / 4));
    const step = power * ([1, 2, 5].findLast((digit) => digit * power <= (to - from) / 4) ?? 1);
    for (let at = Math.ceil(from / step); at * step <= to; at += 1) made.push(at * step);
  }
  return made.filter((value) => value >= from && value <= to);
}

/** @type {(weight: number, longest: number) => number} */
function radius(weight, longest) {
  return longest ? Math.max(LARGEST * Math.sqrt(weight / longest), SMALLEST) : SMALLEST;
}

/** @type {(x: Scale, y: Scale, RIGHT: number) => SVGElement[]} */
function axes(x, y, RIGHT) {
  /** @type {(x1: number, y1: number, x2: number, y2: number) => SVGElement} */
  const line = (x1, y1, x2, y2) => svg("line", { class: "grid-line", x1, y1, x2, y2 });
  /** @type {(attributes: Record<string, any>, content: string) => SVGElement} */
  const text = (attributes, content) => svg("text", { class: "tick", ...attributes }, content);
  return [
    ...x.ticks.map((value) => line(x.at(value), TOP, x.at(value), BOTTOM)),
    ...y.ticks.map((value) => line(LEFT, y.at(value), RIGHT, y.at(value))),
    svg("rect", { class: "frame", x: LEFT, y: TOP, width: RIGHT - LEFT, height: BOTTOM - TOP }),
    ...x.ticks.map((value) => text({ x: x.at(value), y: BOTTOM + 18, "text-anchor": "middle" }, tick(value))),
    ...y.ticks.map((value) => text({ x: LEFT - 8, y: y.at(value) + 4, "text-anchor": "end" }, tick(value, "FLOP/s"))),
    svg("text", { class: "axis", x: (LEFT + RIGHT) / 2, y: BOTTOM + 40, "text-anchor": "middle" }, "intensity, FLOPs per byte moved"),
  ];
}

/** @type {(ceiling: Ceiling, x: Scale, y: Scale) => SVGElement} */
function roofLine({ hardware, source, dtype, flops_per_second: peak, bandwidth_bytes_per_second: slope, is_reference: isReference }, x, y) {
  const ridge = slope ? Math.min(Math.max(peak / slope, x.low), x.high) : x.low;
  const corners = [x.low, ridge, x.high].map((right) => [right, slope ? Math.min(peak, slope * right) : peak]);
  return svg(
    "polyline", { class: isReference ? "roof" : "roof other", points: corners.map(([right, up]) => `${x.at(right)},${y.at(up)}`).join(" ") },
    svg("title", {}, `${hardware}, ${dtype}: ${rate(peak)}, ${bandwidth(slope)}${source ? ` (${source})` : ""}`),
  );
}

// Labels of the peaks: to the right of the rooflines, or above them if the chart is narrow; moved apart if they are too close.
/** @type {(ceilings: Ceiling[], y: Scale, RIGHT: number, isInside: boolean) => SVGElement[]} */
function peakLabels(ceilings, y, RIGHT, isInside) {
  let last = -Infinity;
  return ceilings.filter((ceiling) => ceiling.flops_per_second > y.low && ceiling.flops_per_second < y.high).sort((a, b) => b.flops_per_second - a.flops_per_second).flatMap((ceiling) => {
    const roof = y.at(ceiling.flops_per_second);
    last = Math.max(last + LINE, roof);
    return [
      ...(isInside ? [] : [svg("polyline", { class: "leader", points: `${RIGHT},${roof} ${RIGHT + 5},${roof} ${RIGHT + 10},${last}` })]),
      svg(
        "text", { class: ceiling.is_reference ? "roof-label" : "roof-label other", x: isInside ? RIGHT - 4 : RIGHT + 14, y: isInside ? last - 5 : last + 4, "text-anchor": isInside ? "end" : "start" },
        `${ceiling.dtype} ${rate(ceiling.flops_per_second)}`, svg("title", {}, `${ceiling.hardware}: ${exact(ceiling.flops_per_second)} FLOP/s`),
      ),
    ];
  });
}

// The bandwidth along the slope of the roofline that is the limit, if there is room.
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

// Names of the points with the largest potential speed-up, or with the most time, as long as the labels do not overlap.
/** @type {(points: RooflinePoint[], x: Scale, y: Scale, longest: number, RIGHT: number) => SVGElement[]} */
function pointLabels(points, x, y, longest, RIGHT) {
  /** @type {[number, number, number][]} */
  const taken = [];
  /** @type {SVGElement[]} */
  const made = [];
  /** @type {(point: RooflinePoint) => number} */
  const worth = points.some(({ potential }) => potential) ? ({ potential }) => potential : ({ weight }) => weight;
  for (const point of [...points].sort((a, b) => worth(b) - worth(a))) {
    if (made.length === NAMED || !worth(point)) break;
    const [width, right] = [point.label.length * LETTER, x.at(point.intensity) + radius(point.weight, longest) + 4];
    const isBefore = right + width > RIGHT;
    const left = isBefore ? x.at(point.intensity) - radius(point.weight, longest) - 4 - width : right;
    if (point.intensity < x.low || point.intensity > x.high || point.height < y.low || point.height > y.high) continue;
    const top = y.at(point.height) - LINE / 2;
    if (left < LEFT || taken.some(([l, r, t]) => left < r && left + width > l && Math.abs(top - t) < LINE)) continue;
    taken.push([left, left + width, top]);
    made.push(svg("text", {
      class: "point-label", x: isBefore ? left + width : left, y: top + LINE / 2 + 4, "text-anchor": isBefore ? "end" : "start",
    }, point.label));
  }
  return made;
}
