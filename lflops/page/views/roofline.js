// The view Roofline: a chart of points below the chip's roofs, and a table of how much time each could win.

import { PHASES, reader } from "../table/module_columns.js";
import { colourOfPart } from "../lib/colours.js";
import { chartWidth, element, select } from "../lib/dom.js";
import { bandwidth, count, duration, exact, percent, rate, size } from "../lib/format.js";
import { nothingCounted } from "./operators.js";
import { drawRoofline } from "../charts/roofline.js";
import { sortedTable } from "../table/sorted_table.js";

/** @type {View} */
export const roofline = { id: "roofline", label: "Roofline", draw: drawView, isSized: true };

const POINTS = { repeats: "modules, repeats as one", modules: "modules", operators: "operators" };
const SHORT = { forward: "fwd", backward: "bwd", recompute: "recomp", optimizer: "optim", other: "other", all: "" };
const FIELDS = [
  "module", "label", "times", "has_below", "phase", "flops", "bytes_moved", "fused_bytes", "intensity", "seconds", "achieved", "roof_seconds", "reachable",
  "share", "to_win", "bound", "over",
];
const LONG = 26;

// Its state: points, one of POINTS; off, the phases that are not shown; zoom, the corners; sort and down of the table.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawView(payload, { state, remember, go }) {
  const data = payload.roofline;
  if (data === null) return nothingCounted();
  const kind = /** @type {keyof typeof POINTS} */ (Object.hasOwn(POINTS, state.points || "") ? state.points : "repeats");
  const [{ ceilings }, { table, left_out: leftOut }] = [data, data[kind]];
  const names = payload.modules.name;
  const all = pointsOf(table, names);
  const phases = [...PHASES, "all"].filter((each) => all.some(({ phase }) => phase === each));
  /** @type {(phase: string) => boolean} */
  const isOff = (phase) => (state.off || "").split(",").includes(phase);
  const picture = element("div", {
    class: "picture", role: "group", tabindex: 0, "aria-label": "points: arrow keys go from one to the next, Enter opens its module",
    onkeydown: (/** @type {KeyboardEvent} */ event) => walk(event),
  });
  const unzoom = element("button", { type: "button", onclick: () => { state.zoom = ""; draw(); } }, "reset zoom");
  const card = element("div", { class: "card", role: "status", hidden: true });
  const remark = element("p", { class: "remark" });
  const columns = pointColumns(all, kind);
  /** @type {Map<RooflinePoint, SVGElement>} */
  let circles = new Map();

  /** @type {(point: RooflinePoint) => void} */
  const enter = ({ module }) => { if (module !== null) go("modules", { filter: "", flat: "", row: names[module] }); };
  const rows = sortedTable("what there is to win", {
    size: all.length, usual: "to_win", first: (row) => nameOf(all[row], enter), state, changed: remember,
    onchoose: (row) => point(all[row]), onenter: (row) => enter(all[row]),
  });
  /** @type {RooflinePoint[]} */
  let inOrder = [];
  let current = -1;

  // From point to point, those with the most to win first.
  /** @type {(event: KeyboardEvent) => void} */
  function walk(event) {
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1, Home: 0, End: inOrder.length - 1 };
    if (event.key === "Enter" && inOrder[current]) enter(inOrder[current]);
    else if (event.key === "Escape" && state.zoom) { state.zoom = ""; draw(); } else if (event.key in moves && inOrder.length) {
      current = Math.max(Math.min(moves[event.key], inOrder.length - 1), 0);
      choose(inOrder[current]);
    } else return;
    event.preventDefault();
  }

  // A point is chosen in the table too.
  /** @type {(given: RooflinePoint) => void} */
  function choose(given) {
    rows.go(given.row);
    point(given);
  }

  // Show a point's card next to it, if it is in the chart; without a point hide the card.
  /** @type {(given: RooflinePoint | null) => void} */
  function point(given) {
    for (const circle of circles.values()) circle.classList.remove("pointed");
    const circle = given && circles.get(given);
    card.hidden = !circle;
    if (!given || !circle) return;
    circle.classList.add("pointed");
    card.replaceChildren(...cardOf(given));
    const [frame, spot] = [picture.getBoundingClientRect(), circle.getBoundingClientRect()];
    const isLeft = spot.left - frame.left < frame.width / 2;
    card.style.left = isLeft ? `${spot.right - frame.left + 10}px` : "";
    card.style.right = isLeft ? "" : `${frame.right - spot.left + 10}px`;
    card.style.top = `${Math.max(Math.min(spot.top - frame.top - 30, frame.height - card.offsetHeight), 0)}px`;
  }

  function draw() {
    remember();
    const shown = all.filter(({ phase }) => !isOff(phase));
    const zoom = zoomOf(state.zoom);
    /** @type {(value: number, ends: [number, number]) => boolean} */
    const isWithin = (value, [low, high]) => value >= low && value <= high;
    const inView = shown.filter(({ intensity, height }) => !zoom || (isWithin(intensity, zoom.x) && isWithin(height, zoom.y)));
    const placed = inView.filter(({ intensity }) => intensity > 0);
    const timed = placed.filter(({ isTimed }) => isTimed).length;
    const chart = drawRoofline({
      points: placed, ceilings, pointed: point, chosen: choose, width: chartWidth(), zoom, zoomed: ({ x, y }) => { state.zoom = [...x, ...y].map((each) => each.toPrecision(5)).join(","); draw(); },
      label: `${exact(timed)} points and ${ceilings.length} roofs, intensity against FLOP/s; the table has them in numbers`,
    });
    inOrder = [...placed].sort((a, b) => b.toWin - a.toWin || b.weight - a.weight);
    current = -1;
    unzoom.hidden = !zoom;
    circles = chart.circles;
    card.hidden = true;
    picture.replaceChildren(...(placed.length || ceilings.length ? [chart.node] : []), card);
    remark.textContent = remarks(inView.length - placed.length, placed.length - timed, leftOut);
    rows.show(inView.map(({ row }) => row), columns);
  }

  /** @type {(phase: string) => HTMLElement} */
  function toggle(phase) {
    const button = element("button", {
      type: "button", "aria-pressed": !isOff(phase), title: `show or hide ${phase}`,
      onclick: () => {
        state.off = phases.filter((each) => (each === phase) !== isOff(each)).join(",");
        button.setAttribute("aria-pressed", String(!isOff(phase)));
        draw();
      },
    }, element("span", { class: "key", style: { background: colourOfPart(phase) } }), phase);
    return button;
  }

  const choice = select("points", Object.entries(POINTS), kind, (points) => go("roofline", { points, sort: "", down: false, zoom: "" }));
  draw();
  return element(
    "section", { class: "roofline", "aria-label": "roofline" },
    element(
      "div", { class: "bar-of-controls" }, choice,
      element("div", { class: "phases", role: "group", "aria-label": "phases" }, ...phases.map(toggle)), unzoom, signs(),
    ),
    data.why_unknown ? element("p", { class: "caveat", role: "note" }, `Unknown roof: ${data.why_unknown}.`) : null,
    picture, element("div", { class: "side-by-side" }, remark, roofList(ceilings)),
    data.fusion ? element("p", { class: "remark fusion" }, `${data.fusion}.`) : null, rows.node,
  );
}

// The points of the chart and the table; one without a time is at the height of its roof.
/** @type {(table: Points["table"], names: string[]) => RooflinePoint[]} */
function pointsOf(table, names) {
  /** @type {[string, Reader][]} */
  const read = FIELDS.map((name) => [name, reader(table, name)]);
  return table.phase.map((_, row) => {
    /** @type {Record<string, any>} */
    const each = Object.fromEntries(read.map(([name, value]) => [name, value(row)]));
    const name = each.label ?? (names[each.module] || "(model)");
    return /** @type {RooflinePoint} */ ({
      ...each, row, name, label: `${name.length > LONG ? `…${name.slice(-LONG)}` : name} ${SHORT[/** @type {keyof typeof SHORT} */ (each.phase)]}`.trim(),
      toWin: each.to_win ?? 0, isTimed: each.achieved !== null, height: each.achieved, weight: each.seconds ?? each.roof_seconds ?? 0,
    });
  });
}

/** @type {(points: RooflinePoint[], kind: string) => FlatColumn[]} */
function pointColumns(points, kind) {
  /** @type {(id: string, label: string, text?: Format, hasBar?: boolean) => FlatColumn} */
  const column = (id, label, text, hasBar) => ({ id, label, text, hasBar, read: (row) => points[row][id] });
  const isFused = points.some(({ fused_bytes: bytes }) => bytes !== null);
  return [
    column("name", kind === "operators" ? "operator" : "module"), column("phase", "phase"), column("bound", "bound by"),
    column("to_win", "to win", duration, true), column("share", "of the roof", percent), column("seconds", "time", duration, true),
    column("roof_seconds", "at the roof", duration), column("achieved", "FLOP/s", count), column("reachable", "roof FLOP/s", count),
    column("intensity", "FLOPs/byte", count), ...(isFused ? [column("bytes_moved", "bytes moved", size), column("fused_bytes", "bytes, fused", size)] : []),
  ].filter(({ read }) => points.some((_, row) => read(row) !== null));
}

/** @type {(point: RooflinePoint, enter: (point: RooflinePoint) => void) => HTMLElement} */
function nameOf(point, enter) {
  const { name, times, has_below: hasBelow, over, module } = point;
  const label = module === null ? element("span", { class: "label" }, name) : element("button", {
    type: "button", class: "label to-row", tabindex: -1, title: `${name}: its row in Modules`, onclick: () => enter(point),
  }, name);
  return element(
    "div", { class: "name", role: "gridcell", title: name }, label,
    times > 1 ? element("span", { class: "kind" }, `×${times}`) : null,
    hasBelow ? element("span", { class: "kind", title: "without the modules below it" }, "itself") : null,
    over ? element("span", { class: "mark wrong", title: over }, times > 1 ? "one is over its roof" : "over its roof") : null,
  );
}

/** @type {(point: RooflinePoint) => HTMLElement[]} */
function cardOf(point) {
  const of = [point.phase, point.times > 1 ? `${point.times} together` : null, point.has_below ? "what it runs itself" : null];
  /** @type {[string, string, Format][]} */
  const rows = [
    ["intensity", "intensity", (value) => `${count(value)} FLOPs/byte`], ["achieved", "achieved", rate], ["its roof", "reachable", rate],
    ["of the roof", "share", percent], ["time", "seconds", duration], ["time at its roof", "roof_seconds", duration],
    ["to win", "to_win", duration], ["bound by", "bound", (value) => value ?? "–"], ["FLOPs", "flops", count], ["bytes moved", "bytes_moved", size],
    ...(point.fused_bytes === null ? [] : [/** @type {[string, string, Format]} */ (["bytes, fused", "fused_bytes", size])]),
  ];
  return [
    element("b", {}, point.name), element("div", { class: "quiet" }, of.filter(Boolean).join(", ")),
    element("dl", {}, ...rows.flatMap(([label, field, text]) => [element("dt", {}, label), element("dd", {}, text(point[field]))])),
    ...(point.over ? [element("div", { class: "caveat" }, point.over)] : []),
  ];
}

// The legend of the chart's signs.
function signs() {
  /** @type {(look: string, text: string) => HTMLElement} */
  const sign = (look, text) => element("span", { class: "sign" }, element("span", { class: `dot ${look}` }), text);
  const each = [sign("timed", "timed"), sign("rug", "not timed: intensity alone"), sign("ringed", "over its roof")];
  return element("div", { class: "signs" }, ...each, "area: time");
}

/** @type {(text: string | undefined) => import("../charts/roofline.js").Zoom | null} */
function zoomOf(text) {
  const [left, right, low, high] = (text || "").split(",").map(Number);
  return left > 0 && right > left && low > 0 && high > low ? { x: [left, right], y: [low, high] } : null;
}

/** @type {(nowhere: number, untimed: number, leftOut: number) => string} */
function remarks(nowhere, untimed, leftOut) {
  const parts = [
    leftOut ? `${exact(leftOut)} more with less time are left out` : "",
    untimed ? `${exact(untimed)} without a time are marks on the axis` : "",
    nowhere ? `${exact(nowhere)} compute nothing and have no place in the chart` : "",
    "drag over the chart to zoom",
  ].filter(Boolean);
  return `${parts.join("; ")}.`;
}

// A line for each chip.
/** @type {(ceilings: Ceiling[]) => HTMLElement} */
function roofList(ceilings) {
  /** @type {Map<string, Ceiling[]>} */
  const chips = new Map();
  for (const ceiling of ceilings) {
    const { hardware, source, bandwidth_bytes_per_second: slope, is_judged_by: isJudgedBy } = ceiling;
    const key = JSON.stringify([hardware, source, slope, isJudgedBy]);
    chips.set(key, [...(chips.get(key) ?? []), ceiling]);
  }
  return element("ul", { class: "roofs" }, ...[...chips.values()].map((same) => {
    const [{ hardware, source, bandwidth_bytes_per_second: slope, is_judged_by: isJudgedBy }] = same;
    const peaks = same.map(({ dtype, flops_per_second: peak }) => `${dtype} ${rate(peak)}`).join(", ");
    return element(
      "li", {}, element("span", { class: isJudgedBy ? "stroke" : "stroke other" }), `${hardware}: ${peaks}, ${bandwidth(slope)}`,
      element("span", { class: "remark" }, ` ${[source, isJudgedBy ? "" : "not what is judged by"].filter(Boolean).join("; ")}`),
    );
  }));
}
