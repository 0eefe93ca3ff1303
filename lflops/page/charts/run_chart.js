// A run over time: the mean step as a line on a logarithmic scale, slow steps as dots in the colours of their causes, and the time until each
// restart as bands. Below it, on the same axis, the memory of the process.

import { chartWidth, element, svg } from "../lib/dom.js";
import { duration, longDuration, size } from "../lib/format.js";
import { momentsOfSlowSteps, spansInTime } from "../lib/run.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [72, 12, 10, 22];
const [STEPS, GAP, MEMORY] = [190, 30, 80];

/** @type {(data: RunShown) => HTMLElement} */
export function runChart({ ledger, causes }) {
  const { total, starts, slow_steps: slow } = ledger;
  const [spans, moments] = [spansInTime(ledger), momentsOfSlowSteps(ledger)];
  const width = chartWidth();
  const height = TOP + STEPS + GAP + MEMORY + BOTTOM;
  /** @type {(moment: number) => number} */
  const x = (moment) => LEFT + ((width - LEFT - RIGHT) * moment) / (total || 1);
  const times = [...spans.flatMap(({ step }) => (step === null ? [] : [step])), ...slow.map(({ seconds }) => seconds)];
  const y = times.length ? logarithmic(least(times), most(times)) : () => TOP;
  const bytes = spans.flatMap(({ memory }) => (memory === null ? [] : [memory]));
  const limit = bytes.length ? most(bytes) : 1;
  /** @type {(value: number) => number} */
  const yOfMemory = (value) => TOP + STEPS + GAP + MEMORY * (1 - value / limit);
  /** @type {(read: (span: import("../lib/run.js").SpanInTime) => number | null, down: (value: number) => number) => SVGElement[]} */
  const drawn = (read, down) => lines(spans.map((span) => {
    const value = read(span);
    return value === null ? null : `${x(span.at + span.seconds / 2).toFixed(1)},${down(value).toFixed(1)}`;
  }));
  const label = `the run over time, ${longDuration(total)}: ${times.length ? `steps from ${duration(least(times))} to ${duration(most(times))}, ` : ""}${slow.length} slow steps, memory up to ${bytes.length ? size(limit) : "–"}`;
  const chart = svg(
    "svg", { class: "run-chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...(times.length ? decades(least(times), most(times)).map((value) => tick(width, y(value), duration(value))) : []),
    ...(bytes.length ? [tick(width, yOfMemory(limit), size(limit)), tick(width, yOfMemory(0), "0")] : []),
    ...starts.slice(1).map(({ begin }, row) => {
      const [from, to] = [starts[row].begin + starts[row].seconds, begin].map((moment) => moment - starts[0].begin);
      return svg("rect", { class: "down", x: x(from), y: TOP, width: Math.max(x(to) - x(from), 1.5), height: STEPS + GAP + MEMORY },
        svg("title", {}, `down for ${longDuration(Math.max(to - from, 0))}; start ${row + 1}: ${starts[row].ended}`));
    }),
    ...drawn(({ step }) => step, y), ...drawn(({ memory }) => memory, yOfMemory),
    ...slow.map(({ step, seconds, usual, cause }, row) => svg(
      "circle", { cx: x(moments[row]), cy: y(seconds), r: 4, style: { fill: colourOf(cause) } },
      svg("title", {}, `step ${step}: ${duration(seconds)} instead of ${duration(usual)}, ${causes[cause] ?? cause}`),
    )),
    svg("text", { x: LEFT, y: height - 5 }, "0 s"),
    svg("text", { x: width - RIGHT, y: height - 5, "text-anchor": "end" }, longDuration(total)),
  );
  const legend = [...new Set(slow.map(({ cause }) => cause))].map((cause) => element(
    "li", {}, element("span", { class: "key", style: { background: colourOf(cause) } }), causes[cause] ?? cause,
  ));
  return element("div", {}, element("div", { class: "remark" }, "time of a step, and memory of the process"), chart, element("ul", { class: "legend" }, ...legend));
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

/** @type {(width: number, y: number, text: string) => SVGElement} */
function tick(width, y, text) {
  return svg("g", { class: "tick" }, svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, text));
}

/** @type {(low: number, high: number) => (value: number) => number} */
function logarithmic(low, high) {
  const [from, to] = [Math.log10(low) - 0.1, Math.log10(high) + 0.1];
  return (value) => TOP + STEPS * (1 - (Math.log10(value) - from) / (to - from));
}

// Powers of ten in the range, or both ends of the range if there are fewer than two.
/** @type {(low: number, high: number) => number[]} */
function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += 1) found.push(10 ** power);
  return found.length > 1 ? found : low === high ? [low] : [low, high];
}

/** @type {(values: number[]) => number} */
const least = (values) => values.reduce((a, b) => Math.min(a, b));
/** @type {(values: number[]) => number} */
const most = (values) => values.reduce((a, b) => Math.max(a, b));

/** @type {(cause: string) => string} */
const colourOf = (cause) => `var(--cause-${CSS.escape(cause)}, var(--rest))`;
