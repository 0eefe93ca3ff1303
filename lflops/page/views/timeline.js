// The view Timeline: one step of each rank on a time axis. Its data are loaded when the view is opened.

import { FIRST_ROW, barsOfRank, stepTimeline } from "../charts/step_timeline.js";
import { element, select } from "../lib/dom.js";
import { duration, exact, messageOf, words } from "../lib/format.js";
import { stateOfModules } from "../lib/module_link.js";

/** @type {View} */
export const timeline = { id: "timeline", label: "Timeline", draw: drawTimeline, isSized: true, ofOneRank: true };

const UNKNOWN = "Unknown: there was no traced step and no module-timing step. FlopsMonitor has one in each window.";
const SOURCES = {
  traced: "A step that torch.profiler recorded. Recording slows operators on the host, so proportions are more reliable than times.",
  module_timing: "A module-timing step, without operators. With trace=True, FlopsMonitor records operators as well.",
};
const MEMORY = "Memory was counted in another step. It is aligned by the modules that ran in both steps; the operators between them are spaced evenly.";
const LEVELS = ["2", "3", "4", "6", "8", "12"];

/** @type {WeakMap<Payload, Promise<Timeline>>} */
const loaded = new WeakMap();

// Its state: from, to, levels.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawTimeline(payload, context) {
  const node = element("section", { class: "timeline timeline-view", "aria-label": "timeline" });
  if (!payload.has_timeline) {
    node.append(element("p", { class: "message" }, UNKNOWN));
    return node;
  }
  const data = loaded.get(payload) ?? context.source.timeline(context.window);
  loaded.set(payload, data);
  node.append(element("p", { class: "message" }, "Loading…"));
  data.then(
    (found) => node.replaceChildren(...drawn(found, payload, context)),
    (error) => {
      loaded.delete(payload);
      node.replaceChildren(element("p", { class: "message" }, `The timeline cannot be shown: ${messageOf(error)}`));
    },
  );
  return node;
}

/** @type {(data: Timeline, payload: Payload, context: Context) => HTMLElement[]} */
function drawn({ ranks, memory_at: at }, { memory }, { state, remember, go, rank }) {
  const shown = rank === null ? ranks : ranks.filter((each) => each.rank === rank);
  if (!shown.length) return [element("p", { class: "message" }, `There is no timeline of rank ${rank}: only the first ranks have one.`)];
  const container = element("div", {});
  const usual = shown.length > 1 ? "3" : "8";
  const length = Math.max(...shown.map((each) => each.length));
  const hasMemory = at !== null && memory !== null && shown[0] === ranks[0];
  const choice = select("levels", LEVELS.map((each) => [each, each]), state.levels || usual, (levels) => { state.levels = levels; remember(); fill(); }, "levels of modules");

  function fill() {
    const into = { bars: [], headings: [] };
    let y = FIRST_ROW;
    for (const each of shown) y = barsOfRank(each, y, Number(state.levels || usual), shown.length === 1, into);
    const layers = memory?.categories.length ? memory.categories : ["live"];
    container.replaceChildren(stepTimeline({
      ...into, height: y, length, state, remember, memory: hasMemory && at && memory ? { at, points: memory.points, layers } : null,
      openModule: (name) => go("modules", stateOfModules(name)),
    }));
  }

  fill();
  const left = shown.reduce((sum, each) => sum + each.left_out.reduce((a, b) => a + b), 0);
  const remarks = [
    ...new Set(shown.map(({ source }) => SOURCES[source])), shown.length > 1 ? "The time of each rank starts with its step." : "",
    hasMemory ? MEMORY : "", left ? `${exact(left)} shorter slices are left out.` : "",
  ];
  return [
    element("div", { class: "side-by-side" }, element("h2", {}, `Timeline of one step, ${duration(length / 1e9)}`), choice), container,
    ...(hasMemory && memory?.categories.length ? [element("ul", { class: "legend" }, ...memory.categories.map((name) => element(
      "li", {}, element("span", { class: "key", style: { background: `var(--memory-${CSS.escape(name)}, var(--rest))` } }), words(name),
    )))] : []),
    element("p", { class: "remark" }, remarks.filter(Boolean).join(" ")),
  ];
}
