// The view Timeline: a step of each rank on a time axis. Its data are loaded when the view is opened.

import { FIRST_ROW, barsOfRank, stepTimeline } from "../charts/step_timeline.js";
import { element, select } from "../lib/dom.js";
import { duration, exact, words } from "../lib/format.js";
import { fillWhenLoaded } from "../lib/loading.js";
import { stateOfModules } from "../lib/module_link.js";
import { reader } from "../table/module_columns.js";

/** @type {View} */
export const timeline = { id: "timeline", label: "Timeline", has: ({ has_timeline: has }) => Boolean(has), draw: drawTimeline, isSized: true, ofOneRank: true };

const SOURCES = {
  traced: "torch.profiler recorded this step. Recording slows down operators on the host, so proportions are more reliable than times.",
  module_timing: "This is a module-timing step, so the timeline has no operators.",
};
const MORE = "With trace=True, FlopsMonitor records operators as well.";
const MORE_OF_RANKS = 'With trace=True and trace_ranks="all", FlopsMonitor records operators of all ranks as well.';
const MEMORY = "Live memory comes from another step, the counting step. Its curve is aligned at the modules that ran in both steps. Between these modules, the operators are spaced evenly.";
const LISTS = new Set(["ModuleList", "ModuleDict"]);
const LEVELS = ["2", "3", "4", "6", "8", "12"];

/** @type {WeakMap<Payload, Promise<Timeline>>} */
const loaded = new WeakMap();

// Its state: from, to, levels, step.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawTimeline(payload, context) {
  const node = element("section", { class: "timeline timeline-view", "aria-label": "timeline" });
  fillWhenLoaded(node, loaded, payload, () => context.source.timeline(context.window), (data) => drawn(data, payload, context), "The timeline");
  return node;
}

// The steps that can be chosen; the first is the step of median length of the first rank, if all ranks have it.
/** @type {(ranks: RankTimeline[]) => (number | null)[]} */
function stepsOf(ranks) {
  const all = [...new Set(ranks.map(({ step }) => step))];
  const number = new Set(ranks.map(({ rank }) => rank)).size;
  const ofAll = all.filter((each) => ranks.filter(({ step }) => step === each).length === number);
  return ofAll.length ? ofAll : all;
}

/** @type {(data: Timeline, payload: Payload, context: Context) => HTMLElement[]} */
function drawn(data, payload, context) {
  const { ranks, memory_at: at } = data;
  const { memory } = payload;
  const { state, remember, go, rank } = context;
  const ofRanks = rank === null ? ranks : ranks.filter((each) => each.rank === rank);
  if (!ofRanks.length) return [element("p", { class: "message" }, `Rank ${rank} has no timeline: only the first ranks have a timeline.`)];
  const steps = stepsOf(ofRanks);
  const number = steps.some((each) => String(each) === state.step) ? Number(state.step) : steps[0];
  const shown = ofRanks.filter(({ step }) => step === number);
  const container = element("div", {});
  const usual = shown.length > 1 ? "3" : "8";
  const length = Math.max(...shown.map((each) => each.length));
  const hasMemory = at !== null && memory !== null && shown[0] === ranks[0];
  const kinds = reader(payload.modules, "kind");
  const lists = new Set(payload.modules.name.filter((_, row) => LISTS.has(kinds(row))));
  const isTraced = shown[0].source === "traced";
  const named = (/** @type {number | null} */ step) => (step === null ? "one step" : isTraced ? `recorded step ${step + 1}` : `step ${exact(step)}`);
  const picker = steps.length < 2 ? null : select(
    "step", steps.map((step) => {
      const longest = Math.max(...ofRanks.filter((each) => each.step === step).map((each) => each.length));
      return [String(step), `${named(step)}, ${duration(longest / 1e9)}`];
    }), String(number),
    (step) => { Object.assign(state, { step, from: "", to: "" }); remember(); container.closest("section")?.replaceChildren(...drawn(data, payload, context)); },
    "step of the timeline",
  );
  const choice = select("levels", LEVELS.map((each) => [each, each]), state.levels || usual, (levels) => { state.levels = levels; remember(); fill(); }, "levels of modules");

  function fill() {
    const into = { bars: [], headings: [] };
    let y = FIRST_ROW;
    for (const each of shown) y = barsOfRank(each, y, Number(state.levels || usual), shown.length === 1, lists, into);
    const layers = memory?.categories.length ? memory.categories : ["live"];
    container.replaceChildren(stepTimeline({
      ...into, height: y, length, state, remember, memory: hasMemory && at && memory ? { at, points: memory.points, layers } : null,
      openModule: (name) => go("modules", stateOfModules(name)),
    }));
  }

  fill();
  const left = shown.reduce((sum, each) => sum + each.left_out.reduce((a, b) => a + b), 0);
  const remarks = [
    ...new Set(shown.map(({ source }) => SOURCES[source])), isTraced ? "" : shown.length > 1 ? MORE_OF_RANKS : MORE, shown.length > 1 ? "The time axis of each rank starts when the step begins on this rank." : "",
    hasMemory ? MEMORY : "", left ? `${exact(left)} shorter bars are left out.` : "",
  ];
  return [
    element("div", { class: "side-by-side" }, element("h2", {}, `Timeline of ${named(number)}, ${duration(length / 1e9)}`), element("div", { class: "choices" }, ...(picker ? [picker] : []), choice)), container,
    ...(hasMemory && memory?.categories.length ? [element("ul", { class: "legend" }, ...memory.categories.map((name) => element(
      "li", {}, element("span", { class: "key", style: { background: `var(--memory-${CSS.escape(name)}, var(--rest))` } }), words(name),
    )))] : []),
    element("p", { class: "remark" }, remarks.filter(Boolean).join(" ")),
  ];
}
