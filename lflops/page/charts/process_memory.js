// The memory of the process over the time of a run, with the time until each restart as a band.

import { chartWidth, element, svg } from "../lib/dom.js";
import { longDuration, size } from "../lib/format.js";

const [LEFT, RIGHT, TOP, HEIGHT, BOTTOM] = [78, 12, 10, 90, 36];
const TICKS = 5;

/** @type {(ledger: Ledger) => HTMLElement | null} */
export function processMemory({ spans, starts, total }) {
  const known = spans.map(({ begin, seconds, memory }) => ({ at: begin + seconds / 2 - starts[0].begin, memory }));
  const bytes = known.flatMap(({ memory }) => (memory === null ? [] : [memory]));
  if (!bytes.length) return null;
  const width = chartWidth();
  const most = bytes.reduce((a, b) => Math.max(a, b));
  /** @type {(moment: number) => number} */
  const x = (moment) => LEFT + ((width - LEFT - RIGHT) * moment) / (total || 1);
  /** @type {(value: number) => number} */
  const y = (value) => TOP + HEIGHT * (1 - value / (most || 1));
  const caption = element("p", { class: "step-caption" }, `the process used at most ${size(most)}`);
  const cursor = svg("line", { class: "cursor-line", y1: TOP, y2: TOP + HEIGHT, x1: 0, x2: 0, visibility: "hidden" });
  const chart = svg(
    "svg", { class: "run-chart", viewBox: `0 0 ${width} ${TOP + HEIGHT + BOTTOM}`, role: "img", "aria-label": `memory of the process over ${longDuration(total)}, at most ${size(most)}` },
    ...[0, most].map((value) => svg(
      "g", { class: "tick" }, svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value ? size(value) : "0"),
    )),
    ...starts.slice(1).map(({ begin }, row) => {
      const [from, to] = [starts[row].begin + starts[row].seconds, begin].map((moment) => moment - starts[0].begin);
      return svg("rect", { class: "down", x: x(from), y: TOP, width: Math.max(x(to) - x(from), 1.5), height: HEIGHT },
        svg("title", {}, `the run was down for ${longDuration(Math.max(to - from, 0))}; how start ${row + 1} ended: ${starts[row].ended}`));
    }),
    ...lines(known.map(({ at, memory }) => (memory === null ? null : `${x(at).toFixed(1)},${y(memory).toFixed(1)}`))),
    ...Array.from({ length: TICKS + 1 }, (_, at) => svg(
      "text", { x: x((total * at) / TICKS), y: TOP + HEIGHT + 16, "text-anchor": at === TICKS ? "end" : at ? "middle" : "start" }, at ? longDuration((total * at) / TICKS) : "0",
    )),
    svg("text", { x: (width + LEFT) / 2, y: TOP + HEIGHT + BOTTOM - 4, "text-anchor": "middle" }, "time since the start of the run"),
    cursor,
  );
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const moment = ((((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT)) * total;
    const nearest = known.reduce((best, each) => (each.memory !== null && Math.abs(each.at - moment) < Math.abs(best.at - moment) ? each : best), known.find(({ memory }) => memory !== null) ?? known[0]);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, String(x(nearest.at)));
    cursor.setAttribute("visibility", "visible");
    caption.textContent = `${size(nearest.memory)} after ${longDuration(nearest.at)}`;
  });
  return element("div", {}, caption, chart);
}

// An unknown value interrupts the line. A single point is a line of length 0.
/** @type {(points: (string | null)[]) => SVGElement[]} */
function lines(points) {
  /** @type {string[][]} */
  const parts = [[]];
  for (const point of points) {
    if (point !== null) parts[parts.length - 1].push(point);
    else if (parts[parts.length - 1].length) parts.push([]);
  }
  return parts.filter((part) => part.length).map((part) => svg("polyline", { points: (part.length > 1 ? part : [part[0], part[0]]).join(" ") }));
}
