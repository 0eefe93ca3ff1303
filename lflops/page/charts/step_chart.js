// The times of all steps of a run: a bar for each, stacked by phase, with lines for p50 and p95 and marks below. The pointer anywhere or the arrow
// keys show a bar in words; dragging, or Shift with the arrow keys, selects several.

import { colourOfPart } from "../lib/colours.js";
import { chartWidth, element, svg } from "../lib/dom.js";
import { duration, exact, phaseLabel } from "../lib/format.js";
import { barsOf, highest, inWords, marksOf, phasesOf, stepsIn } from "../lib/steps.js";

/** @typedef {import("../lib/steps.js").StepBar} StepBar */

const [LEFT, RIGHT, TOP, HEIGHT, BOTTOM] = [70, 60, 10, 130, 36];
const ROW = 17; // height of a row of marks: one for windows, one for events
const NARROWEST = 3; // pixels of a bar
const HINT = "Point at a bar, or drag over several bars. Arrow keys move, Shift with arrow keys selects, Escape ends the selection.";
const LEAST_VISIBLE = 0.001; // share of the time below which the legend leaves a phase out
const ASIDE = 7; // pixels between a validation and a checkpoint at the same step
/** @type {Record<string, [string, string]>} */
const SIGNS = { window: ["◆", "profiled window"], checkpoint: ["▲", "checkpoint"], validation: ["●", "validation"], crash: ["✕", "restart"] };

// `recomputes`: activations are recomputed in backward, which is not timed apart in unprofiled steps.
/** @type {(groups: StepGroup[], steps: Steps | null, recomputes: boolean) => HTMLElement} */
export function stepChart(groups, steps, recomputes) {
  const width = chartWidth();
  const inner = width - LEFT - RIGHT;
  const bars = barsOf(groups, Math.floor(inner / NARROWEST));
  const phases = phasesOf(groups);
  const most = highest(bars, steps?.p95 ?? null) || 1;
  // The axis counts steps, so a bar with several steps is wider.
  const before = [0];
  for (const { groups: ofBar } of bars) before.push(before[before.length - 1] + stepsIn(ofBar));
  const each = inner / before[bars.length];
  const marks = marksOf(bars);
  const hasWindows = marks.some(({ kind }) => kind === "window");
  const hasEvents = marks.some(({ kind }) => kind !== "window");
  const marksHeight = ROW * (Number(hasWindows) + Number(hasEvents));
  const [windows, events] = [TOP + HEIGHT + 14, TOP + HEIGHT + marksHeight - 3]; // baselines of the rows
  const height = TOP + HEIGHT + marksHeight + BOTTOM;
  /** @type {(at: number) => number} */
  const x = (at) => LEFT + before[at] * each;
  /** @type {(at: number) => number} */
  const middle = (at) => (x(at) + x(at + 1)) / 2;
  /** @type {(seconds: number) => number} */
  const y = (seconds) => TOP + HEIGHT * (1 - Math.min(seconds / most, 1));
  const usual = steps ? `${steps.said}.` : "";
  const caption = element("p", { class: "step-caption", "aria-live": "polite" }, usual);
  const cursor = svg("rect", { class: "cursor", y: TOP, height: HEIGHT + marksHeight, width: 0, x: 0 });
  let [from, to] = [-1, -1];

  // One path for each phase is drawn faster than a rectangle for each bar and phase.
  const paths = phases.map((phase, layer) => {
    const d = bars.map(({ spent, seconds }, at) => {
      const below = phases.slice(0, layer).reduce((sum, name) => sum + (spent[name] ?? 0), 0);
      const [bottom, top] = [y(below), y(Math.min(below + (spent[phase] ?? 0), seconds))];
      const whole = x(at + 1) - x(at);
      const right = Math.max(whole - (whole > 4 ? 1 : 0), 0.5);
      return bottom - top > 0.05 ? `M${x(at).toFixed(1)} ${bottom.toFixed(1)}h${right.toFixed(1)}V${top.toFixed(1)}h${(-right).toFixed(1)}z` : "";
    }).join("");
    return svg("path", { d, style: { fill: colourOfPart(phase) } });
  });
  const cut = bars.filter(({ seconds }) => seconds > most * 1.001);
  /** @type {(kind: string, at: number) => number} */
  const aside = (kind, at) => {
    const isShared = ["validation", "checkpoint"].every((each) => marks.some((mark) => mark.kind === each && mark.at === at));
    return !isShared ? 0 : kind === "validation" ? -ASIDE : kind === "checkpoint" ? ASIDE : 0;
  };
  const chart = svg(
    "svg", { class: "step-chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `times of the steps: ${steps ? steps.said : inWords(bars)}` },
    ...[0, 0.5, 1].map((part) => svg(
      "g", { class: "tick" }, svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(part * most), y2: y(part * most) }),
      svg("text", { x: LEFT - 8, y: y(part * most) + 4, "text-anchor": "end" }, part ? duration(part * most) : "0"),
    )),
    ...paths,
    ...cut.map((bar) => svg("text", { class: "cut", x: middle(bars.indexOf(bar)), y: TOP + 9, "text-anchor": "middle" }, "⌃")),
    ...lines(steps, most, y, width),
    ...marks.filter(({ kind, at, end }) => kind === "window" && end > at).map(({ at, end }) => svg(
      "rect", { class: "window-range", x: x(at), y: TOP + HEIGHT + 2, width: x(end + 1) - x(at), height: 3 },
    )),
    ...marks.map(({ kind, at, end, text }) => svg(
      "text", { class: `mark-${kind}`, x: (x(at) + x(end + 1)) / 2 + aside(kind, at), y: kind === "window" ? windows : events, "text-anchor": "middle" }, SIGNS[kind][0], svg("title", {}, text),
    )),
    ...ticksOf(bars, width / 120).map(([at, number]) => svg(
      "text", { class: "axis", x: middle(at), y: TOP + HEIGHT + marksHeight + 14, "text-anchor": "middle" }, exact(number),
    )),
    svg("text", { class: "axis", x: LEFT + inner / 2, y: height - 4, "text-anchor": "middle" }, "step"),
    cursor,
  );

  /** @type {(event: PointerEvent) => number} */
  function barAt(event) {
    const box = chart.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    const step = (place - LEFT) / each;
    return Math.max(before.findLastIndex((first, at) => at < bars.length && first <= step), 0);
  }

  /** @type {(first: number, last: number) => void} */
  function show(first, last) {
    [from, to] = [first, last];
    const [low, high] = [Math.min(first, last), Math.max(first, last)];
    cursor.setAttribute("x", String(x(low)));
    cursor.setAttribute("width", String(x(high + 1) - x(low)));
    caption.textContent = inWords(bars.slice(low, high + 1));
  }

  function clear() {
    [from, to] = [-1, -1];
    cursor.setAttribute("width", "0");
    caption.textContent = usual;
  }

  let isDragged = false;
  let isKept = false;
  /** @type {(event: KeyboardEvent) => void} */
  function onKey(event) {
    const last = bars.length - 1;
    /** @type {Record<string, number>} */
    const targets = { ArrowRight: to + 1, ArrowLeft: to < 0 ? last : to - 1, Home: 0, End: last };
    if (event.key === "Escape") { isKept = false; clear(); } else if (event.key in targets) {
      const target = Math.min(Math.max(targets[event.key], 0), last);
      show(event.shiftKey && from >= 0 ? from : target, target);
    } else return;
    event.preventDefault();
  }
  const frame = element("div", {
    class: "frame-of-steps", tabindex: 0, role: "application", "data-chart": "times of the steps", "aria-label": `times of the steps. ${HINT}`, onkeydown: onKey,
    onpointerdown: (/** @type {PointerEvent} */ event) => { isDragged = true; isKept = false; const at = barAt(event); show(at, at); frame.setPointerCapture(event.pointerId); },
    onpointermove: (/** @type {PointerEvent} */ event) => {
      const at = barAt(event);
      if (isDragged) show(from, at);
      else if (!isKept) show(at, at);
    },
    onpointerup: () => { isDragged = false; isKept = from !== to; },
    onpointerleave: () => { if (!isKept && !isDragged) clear(); },
  }, chart);
  const whole = bars.reduce((sum, { seconds }) => sum + seconds, 0);
  /** @type {(phase: string) => boolean} */
  const isVisible = (phase) => bars.reduce((sum, { spent }) => sum + (spent[phase] ?? 0), 0) >= LEAST_VISIBLE * whole;
  const kinds = [...new Set(marks.map(({ kind }) => kind))];
  const legend = element(
    "ul", { class: "legend" },
    ...phases.filter(isVisible).map((phase) => element("li", {}, element("span", { class: "key", style: { background: colourOfPart(phase) } }), recomputes && phase === "backward" ? "backward with recomputation" : phaseLabel(phase))),
    ...kinds.map((kind) => element("li", {}, element("span", { class: `sign mark-${kind}` }, SIGNS[kind][0]), SIGNS[kind][1])),
  );
  const shared = bars.some((bar) => stepsIn(bar.groups) > 1) ? "A bar for several neighbouring steps shows their mean." : "";
  const longestBar = cut.reduce((longer, bar) => bar.seconds > longer.seconds ? bar : longer, cut[0]);
  const longest = cut.length ? `${cut.length === 1 ? "A bar is" : `${cut.length} bars are`} cut (⌃): the longest${longestBar.isProfiled ? ", profiled" : ""} step takes ${duration(longestBar.seconds)}.` : "";
  const remark = element("p", { class: "remark" }, [shared, longest].filter(Boolean).join(" "));
  const hint = element("p", { class: "remark keys" }, HINT);
  return element("div", { class: "steps" }, element("div", { class: "step-head" }, caption, remark), frame, element("div", { class: "step-head" }, legend, hint));
}

/** @type {(steps: Steps | null, most: number, y: (seconds: number) => number, width: number) => SVGElement[]} */
function lines(steps, most, y, width) {
  if (!steps) return [];
  /** @type {[string, number | null][]} */
  const levels = [["p50", steps.p50], ["p95", steps.p95]];
  const known = levels.filter(([, value]) => value !== null && value <= most);
  let last = Infinity;
  return known.map(([label, value]) => {
    const at = y(value ?? 0);
    const text = Math.min(at + 4, last - 12); // labels of close lines do not overlap
    last = text;
    return svg("g", { class: "level" }, svg("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at }), svg("text", { x: width - RIGHT + 6, y: text }, `${label}`, svg("title", {}, duration(value))));
  });
}

// The bars with a number on the axis, with this number: the multiples of a round number of steps.
/** @type {(bars: StepBar[], most: number) => [number, number][]} */
function ticksOf(bars, most) {
  const first = bars[0].groups[0].first;
  const last = bars[bars.length - 1].groups.at(-1)?.last ?? first;
  const distance = roundedUp((last - first + 1) / Math.max(most, 1));
  /** @type {[number, number][]} */
  const ticks = [];
  bars.forEach(({ groups }, at) => {
    const number = Math.ceil(groups[0].first / distance) * distance;
    if (number <= groups[groups.length - 1].last && ticks.at(-1)?.[1] !== number) ticks.push([at, number]);
  });
  return ticks;
}

// The next larger of 1, 2, 5, 10, 20, 50, ...
/** @type {(value: number) => number} */
function roundedUp(value) {
  const power = 10 ** Math.max(Math.floor(Math.log10(value)), 0);
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value) ?? value;
}
