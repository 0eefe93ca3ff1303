// The view Roofline: a chart of points below the rooflines of the chip, and a table of their potential speed-ups.

import { PHASES, reader } from "../table/module_columns.js";
import { colourOfPart } from "../lib/colours.js";
import { chartWidth, element, select } from "../lib/dom.js";
import { bandwidth, count, duration, exact, percent, rate, size } from "../lib/format.js";
import { drawRoofline } from "../charts/roofline.js";
import { sortedTable } from "../table/sorted_table.js";

/** @type {View} */
export const roofline = { id: "roofline", label: "Roofline", within: "modules", has: ({ roofline: data }) => data !== null, draw: drawView, isSized: true };

const POINTS = { repeats: "modules (identical modules as one point)", modules: "modules (each as a point)", operators: "operators" };
const SHORT = { forward: "fwd", backward: "bwd", recompute: "recomp", optimizer: "optim", other: "other", all: "" };
const FIELDS = [
  "module", "label", "times", "has_below", "phase", "flops", "bytes_moved", "fused_bytes", "intensity", "seconds", "flops_per_second", "roof_seconds", "roof_flops_per_second",
  "share", "potential_seconds", "bound", "over",
];
const LONG = 26;

// Its state: points, one of POINTS; off, the phases that are not shown; zoom, the corners; sort and down of the table.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawView(payload, { state, remember, go }) {
  const data = /** @type {Roofs} */ (payload.roofline);
  const kind = /** @type {keyof typeof POINTS} */ (Object.hasOwn(POINTS, state.points || "") ? state.points : "repeats");
  const [{ ceilings }, { table, left_out: leftOut }] = [data, data[kind]];
  const names = payload.modules.name;
  const all = pointsOf(table, names);
  const phases = [...PHASES, "all"].filter((each) => all.some(({ phase }) => phase === each));
  /** @type {(phase: string) => boolean} */
  const isOff = (phase) => (state.off || "").split(",").includes(phase);
  const picture = element("div", {
    class: "picture", role: "group", tabindex: 0, "aria-label": "points: arrow keys go from point to point, Enter opens the module",
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
  const rows = sortedTable("potential speed-ups", {
    size: all.length, usual: "potential_seconds", first: (row) => nameOf(all[row], enter), state, changed: remember,
    onchoose: (row) => point(all[row]), onenter: (row) => enter(all[row]),
  });
  /** @type {RooflinePoint[]} */
  let inOrder = [];
  let current = -1;

  // Go from point to point; the points with the largest potential speed-up come first.
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
      label: `${exact(timed)} points and ${ceilings.length} rooflines: FLOP/s over intensity; the table has the numbers`,
    });
    inOrder = [...placed].sort((a, b) => b.potential - a.potential || b.weight - a.weight);
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
    data.why_unknown ? element("p", { class: "caveat", role: "note" }, `The roofline is unknown: ${data.why_unknown}.`) : null,
    picture, element("div", { class: "side-by-side" }, remark, roofList(ceilings)),
    data.fusion ? element("p", { class: "remark fusion" }, `${data.fusion}.`) : null, rows.node,
  );
}

// The points of the chart and of the table.
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
      potential: each.potential_seconds ?? 0, isTimed: each.flops_per_second !== null, height: each.flops_per_second, weight: each.seconds ?? each.roof_seconds ?? 0,
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
    column("potential_seconds", "potential speed-up", duration, true), column("share", "of the limit", percent), column("seconds", "time", duration, true),
    column("roof_seconds", "roofline-bound time", duration), column("flops_per_second", "FLOP/s", count), column("roof_flops_per_second", "roofline FLOP/s", count),
    column("intensity", "FLOPs/byte", count), ...(isFused ? [column("bytes_moved", "bytes moved", size), column("fused_bytes", "fused bytes moved", size)] : []),
  ].filter(({ read }) => points.some((_, row) => read(row) !== null));
}

/** @type {(point: RooflinePoint, enter: (point: RooflinePoint) => void) => HTMLElement} */
function nameOf(point, enter) {
  const { name, times, has_below: hasBelow, over, module } = point;
  const label = module === null ? element("span", { class: "label" }, name) : element("button", {
    type: "button", class: "label to-row", tabindex: -1, title: `show ${name} in Modules`, onclick: () => enter(point),
  }, name);
  return element(
    "div", { class: "name", role: "gridcell", title: name }, label,
    times > 1 ? element("span", { class: "kind" }, `×${times}`) : null,
    hasBelow ? element("span", { class: "kind", title: "without its submodules" }, "self") : null,
    over ? element("span", { class: "mark wrong", title: over }, times > 1 ? "one is above the limit" : "above the limit") : null,
  );
}

/** @type {(point: RooflinePoint) => HTMLElement[]} */
function cardOf(point) {
  const of = [point.phase, point.times > 1 ? `${point.times} modules together` : null, point.has_below ? "without its submodules" : null];
  /** @type {[string, string, Format][]} */
  const rows = [
    ["intensity", "intensity", (value) => `${count(value)} FLOPs/byte`], ["achieved", "flops_per_second", rate], ["roofline limit", "roof_flops_per_second", rate],
    ["of the limit", "share", percent], ["time", "seconds", duration], ["roofline-bound time", "roof_seconds", duration],
    ["potential speed-up", "potential_seconds", duration], ["bound by", "bound", (value) => value ?? "–"], ["FLOPs", "flops", count], ["bytes moved", "bytes_moved", size],
    ...(point.fused_bytes === null ? [] : [/** @type {[string, string, Format]} */ (["fused bytes moved", "fused_bytes", size])]),
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
  const each = [sign("timed", "with a measured time"), sign("rug", "without a measured time: only the intensity is known"), sign("ringed", "above its roofline limit")];
  return element("div", { class: "signs" }, ...each, "the area of a circle shows its time");
}

/** @type {(text: string | undefined) => import("../charts/roofline.js").Zoom | null} */
function zoomOf(text) {
  const [left, right, low, high] = (text || "").split(",").map(Number);
  return left > 0 && right > left && low > 0 && high > low ? { x: [left, right], y: [low, high] } : null;
}

/** @type {(nowhere: number, untimed: number, leftOut: number) => string} */
function remarks(nowhere, untimed, leftOut) {
  const parts = [
    leftOut ? `${exact(leftOut)} more points with less time are left out.` : "",
    untimed ? `${untimed === 1 ? "1 point without a measured time is a mark" : `${exact(untimed)} points without a measured time are marks`} on the axis.` : "",
    nowhere ? `${nowhere === 1 ? "1 point without FLOPs is" : `${exact(nowhere)} points without FLOPs are`} not in the chart.` : "",
    "Drag across the chart to zoom.",
  ].filter(Boolean);
  return parts.join(" ");
}

// A line for each chip.
/** @type {(ceilings: Ceiling[]) => HTMLElement} */
function roofList(ceilings) {
  /** @type {Map<string, Ceiling[]>} */
  const chips = new Map();
  for (const ceiling of ceilings) {
    const { hardware, source, bandwidth_bytes_per_second: slope, is_reference: isReference } = ceiling;
    const key = JSON.stringify([hardware, source, slope, isReference]);
    chips.set(key, [...(chips.get(key) ?? []), ceiling]);
  }
  return element("ul", { class: "roofs" }, ...[...chips.values()].map((same) => {
    const [{ hardware, source, bandwidth_bytes_per_second: slope, is_reference: isReference }] = same;
    const peaks = same.map(({ dtype, flops_per_second: peak }) => `${dtype} ${rate(peak)}`).join(", ");
    return element(
      "li", {}, element("span", { class: isReference ? "stroke" : "stroke other" }), `${hardware}: ${peaks}, ${bandwidth(slope)}`,
      element("span", { class: "remark" }, ` ${[source, isReference ? "" : "the points are not compared with this chip's roofline"].filter(Boolean).join("; ")}`),
    );
  }));
}
