// Live bytes over the operators of a step: an area for each category, above it the phases, and a cursor that says what is alive where.

import { element, svg } from "../lib/dom.js";
import { exact, percent, size } from "../lib/format.js";

const [WIDTH, HEIGHT] = [1220, 380];
const [LEFT, RIGHT, TOP, BOTTOM] = [76, 14, 34, 40];
const BAND = 18;
const FARTHEST_ROOF = 2;

// `found` is the payload's part; a click or Enter calls `lead` with the module at the cursor.
export function course(found, { state, remember, lead }) {
  const { points } = found;
  const count = points.at.length;
  const [first, last] = [points.at[0], Math.max(points.at[count - 1], points.at[0] + 1)];
  const across = (at) => LEFT + ((at - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const roof = found.capacity_bytes !== null && found.capacity_bytes <= FARTHEST_ROOF * Number(found.peak_bytes) ? found.capacity_bytes : 0;
  const top = 1.12 * Math.max(Number(found.peak_bytes), roof, 1);
  const up = (bytes) => HEIGHT - BOTTOM - (bytes / top) * (HEIGHT - BOTTOM - TOP);
  const layers = found.categories.length ? found.categories : ["live"];
  const bytesAt = (name, row) => Number(points[name][row]);
  let chosen = lastBegun(points.at, Number(state.at ?? (found.peak === null ? first : points.at[found.peak])));

  const line = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  const dot = svg("circle", { class: "cursor", r: 4 });
  const drawing = svg(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `live memory over the step, at most ${size(found.peak_bytes)}` },
    ...scale(top).map((bytes) => svg(
      "g", { class: "tick" }, svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: up(bytes), y2: up(bytes) }),
      svg("text", { x: LEFT - 8, y: up(bytes) + 4, "text-anchor": "end" }, size(bytes).replace(".00", "")),
    )),
    ...areas(layers.map((name) => points[name]), points.at, across, up).map((d, layer) => svg(
      "path", { d, style: { fill: `var(--memory-${layers[layer]}, var(--rest))` } }, svg("title", {}, layers[layer].replaceAll("_", " ")),
    )),
    ...bands(points).flatMap((band) => phase(band, across)),
    ...places(first, last).map((at) => below(across(at), HEIGHT - BOTTOM + 16, exact(at + 1))),
    below((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "operator, in the order of execution"),
    ...(roof ? rule(up(roof), `${size(roof)}: all that ${found.chip} has`, "roof") : []),
    ...(found.peak === null ? [] : peakMark(across(points.at[found.peak]), up(Number(found.peak_bytes)), size(found.peak_bytes))),
    line, dot,
  );
  const said = element("p", { class: "said-at" });
  const legend = element("ul", { class: "legend" });
  const slider = element("div", {
    class: "course", role: "slider", tabindex: 0, "aria-label": "operator of the step", "aria-valuemin": 1, "aria-valuemax": count,
    onpointermove: (event) => look(rowUnder(event)), onclick: (event) => { look(rowUnder(event)); follow(); }, onkeydown: key,
  }, drawing);

  function rowUnder(event) {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    return lastBegun(points.at, first + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first));
  }

  function look(row) {
    chosen = Math.max(Math.min(row, count - 1), 0);
    const [x, live] = [across(points.at[chosen]), bytesAt("live", chosen)];
    for (const [name, value] of [["x1", x], ["x2", x]]) line.setAttribute(name, value);
    for (const [name, value] of [["cx", x], ["cy", up(live)]]) dot.setAttribute(name, value);
    const when = chosen === found.peak ? "at the peak, in" : "before";
    const whole = found.operators === null ? "" : ` of ${exact(found.operators)}`;
    const where = `, ${points.phase[chosen]}, operator ${exact(Math.floor(points.at[chosen]) + 1)}${whole}`;
    said.replaceChildren(
      boldSize(points.live[chosen]), ` ${when} `, element("b", {}, points.operator[chosen]), " of ",
      element("b", {}, points.module[chosen] || "(root)"), element("span", { class: "said" }, where),
    );
    legend.replaceChildren(...layers.filter((name) => name !== "live").map((name) => element(
      "li", {}, element("span", { class: "key", style: { background: `var(--memory-${name}, var(--rest))` } }),
      `${name.replaceAll("_", " ")} `, boldSize(points[name][chosen]),
      element("span", { class: "said" }, ` ${live ? percent(bytesAt(name, chosen) / live) : ""}`),
    )));
    slider.setAttribute("aria-valuenow", chosen + 1);
    slider.setAttribute("aria-valuetext", said.textContent);
  }

  function key(event) {
    const page = Math.max(Math.round(count / 20), 1);
    const arrows = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    const moves = { ...arrows, PageUp: page, PageDown: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") follow();
    else if (event.key in moves) look(chosen + moves[event.key]);
    else return;
    event.preventDefault();
    if (event.key !== "Enter") keep();
  }

  function keep() {
    state.at = String(points.at[chosen]);
    remember();
  }

  function follow() {
    keep();
    lead(points.module[chosen]);
  }

  look(chosen);
  return element("div", {}, said, slider, legend);
}

function boldSize(value) {
  return element("b", { title: `${exact(value)} bytes` }, size(value));
}

// The row whose operator is the last to have begun there.
function lastBegun(at, wanted) {
  let [low, high] = [0, at.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (at[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Each layer stands on the one before: a path along its upper edge and back along its lower one.
function areas(layers, at, across, up) {
  const floor = at.map(() => 0);
  const corner = (row) => `${across(at[row]).toFixed(1)},${up(floor[row]).toFixed(1)}`;
  return layers.map((bytes) => {
    const below = at.map((_, row) => corner(at.length - 1 - row));
    bytes.forEach((each, row) => { floor[row] += Number(each); });
    return `M${at.map((_, row) => corner(row)).join("L")}L${below.join("L")}Z`;
  });
}

// Stretches of one phase, each up to where the next begins.
function bands({ phase: phases, at }) {
  const found = [];
  phases.forEach((name, row) => {
    if (found.at(-1)?.name !== name) found.push({ name, from: at[row], to: at[row] });
    found.at(-1).to = at[Math.min(row + 1, at.length - 1)];
  });
  return found;
}

function phase({ name, from, to }, across) {
  const [x, width] = [across(from), across(to) - across(from)];
  return [
    svg("rect", { x, width, y: 4, height: BAND, style: { fill: `var(--phase-${name})` } }, svg("title", {}, name)),
    width < 9 * name.length ? null : svg("text", { class: "phase-name", x: x + 6, y: 4 + BAND - 5 }, name),
  ];
}

function below(x, y, text) {
  return svg("text", { class: "tick-label", x, y, "text-anchor": "middle" }, text);
}

function rule(y, text, kind) {
  return [
    svg("line", { class: kind, x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
    svg("text", { class: "mark-label", x: LEFT + 8, y: y - 5 }, text),
  ];
}

// Its label stands on the side where there is room.
function peakMark(x, y, text) {
  const isLate = x > WIDTH / 2;
  return [
    svg("circle", { class: "peak", cx: x, cy: y, r: 4 }),
    svg("text", { class: "mark-label", x: x + (isLate ? -9 : 9), y: y - 6, "text-anchor": isLate ? "end" : "start" }, `peak ${text}`),
  ];
}

// Powers of two, so that they read as whole sizes.
function scale(top) {
  const step = 2 ** Math.max(Math.ceil(Math.log2(top / 6)), 0);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, number) => number * step);
}

function places(first, last) {
  const rough = (last - first) / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough), 1);
  const found = [];
  for (let at = Math.ceil((first + 1) / step) * step - 1; at <= last; at += step) if (at >= first) found.push(at);
  return found;
}
