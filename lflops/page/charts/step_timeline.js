// One step on a time axis: modules, operators and kernels as bars, and live memory below them. The wheel and the keyboard zoom, dragging pans.
// Only visible bars are drawn.

import { areas } from "./memory_timeline.js";
import { colourOfName, colourOfPart } from "../lib/colours.js";
import { chartWidth, element, svg } from "../lib/dom.js";
import { duration, exact, percent, phaseLabel, size, words } from "../lib/format.js";

const [LEFT, RIGHT, AXIS] = [112, 10, 24];
const [ROW, BAR, GAP] = [20, 18, 8];
const MEMORY = 120;
const NARROWEST = 0.5; // pixels; of several narrower bars at one place, one is drawn
const LETTER = 7;
const LEAST_LETTERS = 5; // of the end of a word
const CLOSEST = 1000; // nanoseconds across the picture at the highest zoom
const STEP = 1.25; // zoom factor of one turn of the wheel
const DRAGGED = 4; // pixels

/**
 * `y` is the upper edge of a bar, `row` the module that it opens, or null.
 * @typedef {{ y: number, start: number, end: number, label: string, what: string, colour: string, row: string | null }} Bar
 * @typedef {{ y: number, text: string }} Heading
 * @typedef {{ at: number[], points: Lists, layers: string[] }} MemoryInTime
 * `state` has from and to, the nanoseconds at the edges of the picture; without them the whole step is shown.
 * @typedef {{
 *   bars: Bar[], headings: Heading[], height: number, length: number, memory: MemoryInTime | null, state: State, remember: () => void,
 *   openModule: (row: string) => void,
 * }} StepTimelineData
 */
/** @type {(data: StepTimelineData) => HTMLElement} */
export function stepTimeline({ bars, headings, height, length, memory, state, remember, openModule }) {
  const width = chartWidth();
  const rows = [...new Set(bars.map(({ y }) => y))].sort((a, b) => a - b).map((y) => bars.filter((bar) => bar.y === y).sort((a, b) => a.start - b.start));
  let [from, to] = within(Number(state.from ?? 0), Number(state.to ?? length));
  let active = bars[0];
  /** @type {{ x: number, from: number, moved: boolean } | null} */
  let drag = null;
  let later = 0;
  const caption = element("p", { class: "timeline-caption", "aria-live": "polite" });
  const picture = element("div", { class: "picture-of-step" });
  const frame = element("div", {
    class: "timeline step-timeline", role: "application", tabindex: 0, "data-chart": "timeline of a step",
    "aria-label": "timeline of a step: arrow keys go from bar to bar, plus and minus zoom, 0 shows the whole step, Enter opens the module",
    onkeydown: onKey, onwheel: onWheel, onpointerdown: onDown, onpointermove: onMove, onpointerup: onUp, onpointercancel: () => { drag = null; },
    ondblclick: (/** @type {MouseEvent} */ event) => { const bar = barOf(event); if (bar) zoomTo(bar); },
  }, picture);

  /** @type {(start: number, end: number) => [number, number]} */
  function within(start, end) {
    const span = Math.min(Math.max(end - start, Math.min(CLOSEST, length)), length);
    const first = Math.min(Math.max(Number.isFinite(start) ? start : 0, 0), length - span);
    return [first, Number.isFinite(span) ? first + span : length];
  }

  /** @type {(moment: number) => number} */
  const across = (moment) => LEFT + ((moment - from) / (to - from)) * (width - LEFT - RIGHT);
  /** @type {(event: MouseEvent) => number} */
  const placeOf = (event) => {
    const box = picture.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * width;
  };
  /** @type {(place: number) => number} */
  const momentAt = (place) => from + ((place - LEFT) / (width - LEFT - RIGHT)) * (to - from);
  /** @type {(event: Event) => Bar | null} */
  const barOf = ({ target }) => (target instanceof Element && target.closest("[data-bar]") ? bars[Number(target.closest("[data-bar]")?.getAttribute("data-bar"))] : null);

  function draw() {
    const total = height + (memory ? MEMORY + GAP : 0);
    const drawn = svg(
      "svg", { viewBox: `0 0 ${width} ${total}`, role: "img", "aria-label": `${duration(length / 1e9)} of a step` },
      ...ticks(from, to, width / 130).map((moment) => svg(
        "g", { class: "tick" }, svg("line", { x1: across(moment), x2: across(moment), y1: AXIS - 4, y2: total }),
        svg("text", { x: across(moment), y: AXIS - 8, "text-anchor": "middle" }, moment ? duration(moment / 1e9) : "0"),
      )),
      ...headings.map(({ y, text }) => svg("text", { class: "tick-label", x: LEFT - 8, y: y + 13, "text-anchor": "end" }, text)),
      ...rows.flatMap(drawnRow),
      ...(memory ? memoryBelow(memory) : []),
    );
    picture.replaceChildren(drawn);
    mark();
  }

  /** @type {(row: Bar[]) => SVGElement[]} */
  function drawnRow(row) {
    let last = -1;
    return row.flatMap((bar) => {
      if (bar.end < from || bar.start > to) return [];
      const [left, right] = [Math.max(across(bar.start), LEFT), Math.min(across(bar.end), width - RIGHT)];
      if (right - left < NARROWEST && right - last < NARROWEST) return [];
      last = right;
      const letters = Math.floor((right - left - 6) / LETTER);
      const text = fitting(bar.label, letters);
      return [svg(
        "g", { class: "bar-in-time", "data-bar": bars.indexOf(bar) },
        svg("rect", { x: left.toFixed(2), y: bar.y, width: Math.max(right - left - (right - left > 4 ? 1 : 0), 0.7).toFixed(2), height: BAR, style: { fill: bar.colour } }),
        ...(text ? [svg("text", { class: "bar-label", x: left + 4, y: bar.y + 13 }, text)] : []),
      )];
    });
  }

  /** @type {(memory: MemoryInTime) => SVGElement[]} */
  function memoryBelow({ at, points, layers }) {
    const first = Math.max(at.findLastIndex((moment) => moment < from), 0);
    const end = at.findIndex((moment) => moment > to);
    const shown = [first, (end < 0 ? at.length : end + 1)];
    /** @type {<Each>(values: Each[]) => Each[]} */
    const edged = (values) => [values[0], ...values, values[values.length - 1]]; // memory before the first and after the last operator
    const most = points.live.reduce((/** @type {number} */ sum, /** @type {Count} */ bytes) => Math.max(sum, Number(bytes)), 1);
    const floor = height + GAP + MEMORY;
    /** @type {(bytes: number) => number} */
    const up = (bytes) => floor - (bytes / most) * (MEMORY - 16);
    /** @type {(moment: number) => number} */
    const inside = (moment) => Math.min(Math.max(across(moment), LEFT), width - RIGHT);
    const paths = areas(layers.map((name) => edged(points[name].slice(...shown))), [from, ...at.slice(...shown), to], inside, up);
    return [
      ...paths.map((d, layer) => svg("path", { d, style: { fill: `var(--memory-${layers[layer]}, var(--rest))` } }, svg("title", {}, words(layers[layer])))),
      svg("text", { class: "tick-label", x: LEFT - 8, y: height + GAP + 13, "text-anchor": "end" }, "live memory"),
      svg("text", { class: "tick-label", x: LEFT - 8, y: height + GAP + 29, "text-anchor": "end" }, `≤ ${size(most)}`),
    ];
  }

  /** @type {(moment?: number) => void} */
  function mark(moment) {
    for (const each of picture.querySelectorAll(".chosen-bar")) each.classList.remove("chosen-bar");
    if (!active) return;
    picture.querySelector(`[data-bar="${bars.indexOf(active)}"]`)?.classList.add("chosen-bar");
    const took = (active.end - active.start) / 1e9;
    const open = active.row === null ? "" : element("button", { type: "button", class: "leading", onclick: () => openModule(active.row ?? "") }, "show in Modules");
    caption.replaceChildren(
      element("b", {}, active.what), ` ${duration(took)}, ${percent((active.end - active.start) / length)} of the step, starting at ${duration(active.start / 1e9)} `, open,
      ...(memory && moment !== undefined ? [element("span", { class: "quiet" }, ` live memory at ${duration(moment / 1e9)}: `, liveAt(memory, moment))] : []),
    );
  }

  function rememberLater() {
    state.from = from > 0 || to < length ? String(Math.round(from)) : "";
    state.to = from > 0 || to < length ? String(Math.round(to)) : "";
    clearTimeout(later);
    later = window.setTimeout(remember, 300);
  }

  /** @type {(start: number, end: number) => void} */
  function look(start, end) {
    [from, to] = within(start, end);
    rememberLater();
    draw();
  }

  /** @type {(factor: number, moment: number) => void} */
  const zoom = (factor, moment) => look(moment - (moment - from) * factor, moment - (moment - from) * factor + (to - from) * factor);

  /** @type {(bar: Bar) => void} */
  function zoomTo(bar) {
    active = bar;
    const margin = 0.02 * (bar.end - bar.start);
    look(bar.start - margin, bar.end + margin);
  }

  /** @type {(event: WheelEvent) => void} */
  function onWheel(event) {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const turned = Math.abs(event.deltaY) || Math.abs(event.deltaX);
    const forward = (event.deltaY || event.deltaX) > 0;
    if (!sideways && forward && to - from >= length) return; // the page scrolls
    event.preventDefault();
    if (sideways) look(from + (forward ? 1 : -1) * 0.1 * (to - from), to + (forward ? 1 : -1) * 0.1 * (to - from));
    else if (turned) zoom(forward ? STEP : 1 / STEP, momentAt(placeOf(event)));
  }

  /** @type {(event: PointerEvent) => void} */
  function onDown(event) {
    if (event.button === 0) drag = { x: placeOf(event), from, moved: false };
  }

  /** @type {(event: PointerEvent) => void} */
  function onMove(event) {
    const place = placeOf(event);
    if (drag && (drag.moved || Math.abs(place - drag.x) > DRAGGED)) {
      drag.moved = true;
      frame.setPointerCapture(event.pointerId);
      const first = drag.from - ((place - drag.x) / (width - LEFT - RIGHT)) * (to - from);
      look(first, first + (to - from));
      return;
    }
    const bar = barOf(event);
    if (bar) active = bar;
    if (place >= LEFT) mark(Math.min(Math.max(momentAt(place), 0), length));
  }

  /** @type {(event: PointerEvent) => void} */
  function onUp(event) {
    if (drag && !drag.moved) active = barOf(event) ?? active;
    drag = null;
    mark();
  }

  // Up and down go to the bar at the same time in the next row that has one.
  /** @type {(rows: Bar[][], way: 1 | -1) => Bar} */
  function besides(candidates, way) {
    const at = candidates.findIndex((row) => row.includes(active));
    const middle = (Math.max(active.start, from) + Math.min(active.end, to)) / 2;
    for (let next = at + way; next >= 0 && next < candidates.length; next += way) {
      const found = candidates[next].find(({ start, end }) => start <= middle && middle <= end) ?? candidates[next].find(({ start, end }) => start < active.end && end > active.start);
      if (found) return found;
    }
    return active;
  }

  /** @type {(event: KeyboardEvent) => void} */
  function onKey(event) {
    if (!active || event.target !== frame) return;
    const row = rows.find((each) => each.includes(active)) ?? [];
    const at = row.indexOf(active);
    const middle = (active.start + active.end) / 2;
    /** @type {Record<string, () => Bar | undefined>} */
    const moves = {
      ArrowRight: () => row[at + 1], ArrowLeft: () => row[at - 1], ArrowDown: () => besides(rows, 1), ArrowUp: () => besides(rows, -1),
      Home: () => row[0], End: () => row.at(-1),
    };
    if (event.shiftKey && event.key === "ArrowRight") look(from + 0.1 * (to - from), to + 0.1 * (to - from));
    else if (event.shiftKey && event.key === "ArrowLeft") look(from - 0.1 * (to - from), to - 0.1 * (to - from));
    else if (event.key in moves) {
      active = moves[event.key]() ?? active;
      if (active.end < from || active.start > to) look(active.start - 0.1 * (to - from), active.start + 0.9 * (to - from));
      mark();
    } else if (event.key === "+" || event.key === "=") zoom(1 / 2, middle);
    else if (event.key === "-") zoom(2, middle);
    else if (event.key === "0") look(0, length);
    else if (event.key === " ") zoomTo(active);
    else if (event.key === "Enter" && active.row !== null) openModule(active.row);
    else return;
    event.preventDefault();
  }

  draw();
  const button = (/** @type {string} */ text, /** @type {string} */ spoken, /** @type {() => void} */ act) => element("button", { type: "button", "aria-label": spoken, onclick: act }, text);
  return element(
    "div", {},
    element(
      "div", { class: "timeline-head" }, caption,
      element(
        "div", { class: "zooms" }, button("+", "zoom in", () => zoom(1 / 2, (from + to) / 2)), button("−", "zoom out", () => zoom(2, (from + to) / 2)),
        button("whole step", "show the whole step", () => look(0, length)),
      ),
    ),
    frame,
  );
}

// The rows of one rank from `top` down: modules by depth, then operators and kernels. Returns the top of the next rank.
/** @type {(rank: RankTimeline, top: number, levels: number, isAlone: boolean, into: { bars: Bar[], headings: Heading[] }) => number} */
export function barsOfRank(rank, top, levels, isAlone, { bars, headings }) {
  const { names, slices } = rank;
  let y = top;
  /** @type {(table: Lists, rows: number[], text: string, each: (row: number) => Omit<Bar, "start" | "end">, height: number) => void} */
  function block(table, rows, text, each, height) {
    if (!rows.length) return;
    headings.push({ y, text });
    for (const row of rows) bars.push({ start: table.start[row], end: table.start[row] + table.length[row], ...each(row) });
    y += height * ROW + GAP;
  }
  const lists = listsIn(names);
  // A list of modules has no row: its modules are named by their numbers.
  /** @type {(row: number) => number} */
  const depthOf = (row) => slices.depth[row] - listsAbove(names[slices.name[row]], lists);
  const all = slices.name.map((_, row) => row).filter((row) => depthOf(row) < levels && !(slices.depth[row] && lists.has(names[slices.name[row]])));
  for (const lane of [...new Set(all.map((row) => slices.lane[row]))].sort((a, b) => a - b)) {
    const rows = all.filter((row) => slices.lane[row] === lane);
    const deepest = rows.reduce((most, row) => Math.max(most, depthOf(row)), 0);
    const begin = y;
    block(slices, rows, isAlone ? "modules" : `rank ${rank.rank}`, (row) => {
      const [name, phase, depth] = [names[slices.name[row]], slices.phase[row], depthOf(row)];
      return {
        y: begin + depth * ROW, label: depth ? shortName(name) : phaseLabel(phase), what: depth ? `${name}, ${phase}` : phaseLabel(phase), row: depth ? name : null,
        colour: `color-mix(in oklab, ${colourOfPart(phase)} ${Math.max(100 - 9 * depth, 46)}%, white)`,
      };
    }, deepest + 1);
  }
  /** @type {(table: Lists, kind: string, place: string) => void} */
  function works(table, kind, place) {
    for (const lane of [...new Set(table.lane)].sort((a, b) => a - b)) {
      const rows = table.name.map((_, row) => row).filter((row) => table.lane[row] === lane);
      const begin = y;
      block(table, rows, lane ? `${place} ${exact(lane)}` : `${kind}s`, (row) => ({
        y: begin, label: names[table.name[row]].replace(/^aten::/, ""), what: `${kind} ${names[table.name[row]]}`, row: null, colour: colourOfName(names[table.name[row]]),
      }), 1);
    }
  }
  works(rank.operators, "operator", "thread");
  works(rank.kernels, "kernel", "stream");
  return y;
}

/** @type {number} */
export const FIRST_ROW = AXIS;

// The names of lists: what is below them has numbers.
/** @type {(names: string[]) => Set<string>} */
function listsIn(names) {
  return new Set(names.filter((name) => /[.]\d+$/.test(name)).map((name) => name.slice(0, name.lastIndexOf("."))));
}

/** @type {(name: string, lists: Set<string>) => number} */
function listsAbove(name, lists) {
  const parts = name.split(".");
  return parts.filter((_, at) => at && lists.has(parts.slice(0, at).join("."))).length;
}

// A label, or its informative end: the last part of a name. Half a word says nothing.
/** @type {(label: string, letters: number) => string} */
function fitting(label, letters) {
  const last = label.slice(label.lastIndexOf(".") + 1);
  return label.length <= letters ? label : last.length <= letters ? last : letters >= LEAST_LETTERS ? `…${last.slice(1 - letters)}` : "";
}

// The last part of a name; for a number, the part before it too.
/** @type {(name: string) => string} */
function shortName(name) {
  const parts = name.split(".");
  return parts.slice(/^\d+$/.test(parts[parts.length - 1]) ? -2 : -1).join(".");
}

/** @type {(memory: MemoryInTime, moment: number) => string} */
function liveAt({ at, points }, moment) {
  const row = Math.max(at.findLastIndex((each) => each <= moment), 0);
  return size(points.live[row]);
}

/** @type {(from: number, to: number, most: number) => number[]} */
function ticks(from, to, most) {
  const rough = (to - from) / Math.min(Math.max(most, 2), 8);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 10 * power;
  return Array.from({ length: Math.floor(to / step) - Math.ceil(from / step) + 1 }, (_, number) => (Math.ceil(from / step) + number) * step);
}
