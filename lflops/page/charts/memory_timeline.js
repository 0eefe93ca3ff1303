// The memory timeline: live bytes over the operators of a step, with an area for each category, the phases above, and a cursor.

import { colourOfPart } from "../lib/colours.js";
import { chartWidth, element, svg } from "../lib/dom.js";
import { exact, percent, size, words } from "../lib/format.js";

const HEIGHT = 340;
const [LEFT, RIGHT, TOP, BOTTOM] = [76, 14, 34, 40];
/** @typedef {{ name: string, from: number, to: number }} Band */
/** @typedef {(value: number) => number} Project */

const BAND = 18;
const FARTHEST_ROOF = 2;

// A click or Enter calls `openModule` with the module at the cursor.
// `unit` is the noun for a point, `moment` says when its bytes are alive, and `marked` is the noun for the marked point.
/** @typedef {{ state: State, remember: () => void, openModule: (name: string) => void, unit?: string, moment?: string, marked?: string }} Options */
/** @type {(memory: LiveMemory, options: Options) => HTMLElement} */
export function memoryTimeline(memory, { state, remember, openModule, unit = "operator", moment = "before", marked = "peak" }) {
  const { points } = memory;
  const WIDTH = chartWidth();
  const count = points.at.length;
  const [first, last] = [points.at[0], Math.max(points.at[count - 1], points.at[0] + 1)];
  /** @type {Project} */
  const across = (at) => LEFT + ((at - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const roof = memory.capacity_bytes !== null && memory.capacity_bytes <= FARTHEST_ROOF * Number(memory.peak_bytes) ? memory.capacity_bytes : 0;
  const top = 1.12 * Math.max(Number(memory.peak_bytes), ...points.live.map(Number), roof, 1);
  /** @type {Project} */
  const up = (bytes) => HEIGHT - BOTTOM - (bytes / top) * (HEIGHT - BOTTOM - TOP);
  const layers = memory.categories.length ? memory.categories : ["live"];
  /** @type {(name: string, row: number) => number} */
  const bytesAt = (name, row) => Number(points[name][row]);
  let chosen = lastBegun(points.at, Number(state.at ?? (memory.peak === null ? first : points.at[memory.peak])));

  const line = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  const dot = svg("circle", { class: "cursor", r: 4 });
  const drawing = svg(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `live memory over the step, at most ${size(memory.peak_bytes)}` },
    ...ticksUpwards(top).map((bytes) => svg(
      "g", { class: "tick" }, svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: up(bytes), y2: up(bytes) }),
      svg("text", { x: LEFT - 8, y: up(bytes) + 4, "text-anchor": "end" }, size(bytes).replace(".00", "")),
    )),
    ...areas(layers.map((name) => points[name]), points.at, across, up).map((d, layer) => svg(
      "path", { d, style: { fill: `var(--memory-${layers[layer]}, var(--rest))` } }, svg("title", {}, words(layers[layer])),
    )),
    ...bands(points).flatMap((band) => phase(band, across)),
    ...ticksAcross(first, last).map((at) => label(across(at), HEIGHT - BOTTOM + 16, exact(at + 1))),
    label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, `${unit}, in the order of execution`),
    ...(roof ? horizontalRule(up(roof), WIDTH, `${size(roof)}: the memory of ${memory.chip}`, "roof") : []),
    ...(memory.peak === null ? [] : peakMark(across(points.at[memory.peak]), up(Number(memory.peak_bytes)), WIDTH, `${marked} ${size(memory.peak_bytes)}`)),
    line, dot,
  );
  const caption = element("p", { class: "timeline-caption" });
  const legend = element("ul", { class: "legend" });
  const slider = element("div", {
    class: "timeline", role: "slider", tabindex: 0, "aria-label": `${unit} of the step`, "aria-valuemin": 1, "aria-valuemax": count,
    onpointermove: (/** @type {PointerEvent} */ event) => moveTo(rowUnder(event)),
    onclick: (/** @type {MouseEvent} */ event) => { moveTo(rowUnder(event)); openAtCursor(); }, onkeydown: onKey,
  }, drawing);

  /** @type {(event: PointerEvent | MouseEvent) => number} */
  function rowUnder(event) {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    return lastBegun(points.at, first + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first));
  }

  /** @type {(row: number) => void} */
  function moveTo(row) {
    chosen = Math.max(Math.min(row, count - 1), 0);
    const [x, live] = [across(points.at[chosen]), bytesAt("live", chosen)];
    for (const [name, value] of [["x1", x], ["x2", x]]) line.setAttribute(String(name), String(value));
    for (const [name, value] of [["cx", x], ["cy", up(live)]]) dot.setAttribute(String(name), String(value));
    const when = chosen === memory.peak ? `at the ${marked}, in` : moment;
    const where = `, ${points.phase[chosen]}, ${unit} ${exact(Math.floor(points.at[chosen]) + 1)} of ${exact(memory.operators)}`;
    caption.replaceChildren(
      boldSize(points.live[chosen]), ` ${when} `, element("b", {}, points.operator[chosen]), " of ",
      element("b", {}, points.module[chosen] || "(model)"), element("span", { class: "quiet" }, where),
    );
    legend.replaceChildren(...layers.filter((name) => name !== "live").map((name) => element(
      "li", {}, element("span", { class: "key", style: { background: `var(--memory-${name}, var(--rest))` } }),
      `${words(name)} `, boldSize(points[name][chosen]),
      element("span", { class: "quiet" }, ` ${live ? percent(bytesAt(name, chosen) / live) : ""}`),
    )));
    slider.setAttribute("aria-valuenow", String(chosen + 1));
    slider.setAttribute("aria-valuetext", caption.textContent ?? "");
  }

  /** @type {(event: KeyboardEvent) => void} */
  function onKey(event) {
    const page = Math.max(Math.round(count / 20), 1);
    const arrows = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    /** @type {Record<string, number>} */
    const moves = { ...arrows, PageUp: page, PageDown: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") openAtCursor();
    else if (event.key in moves) moveTo(chosen + moves[event.key]);
    else return;
    event.preventDefault();
    if (event.key !== "Enter") rememberCursor();
  }

  function rememberCursor() {
    state.at = String(points.at[chosen]);
    remember();
  }

  function openAtCursor() {
    rememberCursor();
    openModule(points.module[chosen]);
  }

  moveTo(chosen);
  return element("div", {}, caption, slider, legend);
}

/** @type {(value: Count) => HTMLElement} */
function boldSize(value) {
  return element("b", { title: `${exact(value)} bytes` }, size(value));
}

// The row of the last operator that began at or before a position.
/** @type {(at: number[], wanted: number) => number} */
function lastBegun(at, wanted) {
  let [low, high] = [0, at.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (at[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Stacked areas: the path of each is along its upper edge and back along its lower one.
/** @type {(layers: Count[][], at: number[], across: Project, up: Project) => string[]} */
export function areas(layers, at, across, up) {
  const floor = at.map(() => 0);
  /** @type {(row: number) => string} */
  const corner = (row) => `${across(at[row]).toFixed(1)},${up(floor[row]).toFixed(1)}`;
  return layers.map((bytes) => {
    const lower = at.map((_, row) => corner(at.length - 1 - row));
    bytes.forEach((each, row) => { floor[row] += Number(each); });
    return `M${at.map((_, row) => corner(row)).join("L")}L${lower.join("L")}Z`;
  });
}

// Ranges of one phase, each up to where the next one begins.
/** @type {(points: Lists) => Band[]} */
function bands({ phase: phases, at }) {
  /** @type {Band[]} */
  const ranges = [];
  phases.forEach((name, row) => {
    if (ranges.at(-1)?.name !== name) ranges.push({ name, from: at[row], to: at[row] });
    ranges[ranges.length - 1].to = at[Math.min(row + 1, at.length - 1)];
  });
  return ranges;
}

/** @type {(band: Band, across: Project) => SVGElement[]} */
function phase({ name, from, to }, across) {
  const [x, width] = [across(from), across(to) - across(from)];
  return [
    svg("rect", { x, width, y: 4, height: BAND, style: { fill: colourOfPart(name) } }, svg("title", {}, name)),
    ...(width < 9 * name.length ? [] : [svg("text", { class: "phase-name", x: x + 6, y: 4 + BAND - 5 }, name)]),
  ];
}

/** @type {(x: number, y: number, text: string) => SVGElement} */
function label(x, y, text) {
  return svg("text", { class: "tick-label", x, y, "text-anchor": "middle" }, text);
}

/** @type {(y: number, width: number, text: string, kind: string) => SVGElement[]} */
function horizontalRule(y, width, text, kind) {
  return [
    svg("line", { class: kind, x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
    svg("text", { class: "mark-label", x: LEFT + 8, y: y - 5 }, text),
  ];
}

// The mark of the peak; its label is on the side where there is room.
/** @type {(x: number, y: number, width: number, text: string) => SVGElement[]} */
function peakMark(x, y, width, text) {
  const isLate = x > width / 2;
  return [
    svg("circle", { class: "peak", cx: x, cy: y, r: 4 }),
    svg("text", { class: "mark-label", x: x + (isLate ? -9 : 9), y: y - 6, "text-anchor": isLate ? "end" : "start" }, text),
  ];
}

// Powers of two, so that they read as whole sizes.
/** @type {(top: number) => number[]} */
function ticksUpwards(top) {
  const step = 2 ** Math.max(Math.ceil(Math.log2(top / 6)), 0);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, number) => number * step);
}

/** @type {(first: number, last: number) => number[]} */
function ticksAcross(first, last) {
  const rough = (last - first) / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 1, 1);
  /** @type {number[]} */
  const positions = [];
  for (let at = Math.ceil((first + 1) / step) * step - 1; at <= last; at += step) if (at >= first) positions.push(at);
  return positions;
}
