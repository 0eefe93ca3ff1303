// The view Run, which opens first: the first screen of the run, then every second of it by category, then the profiled window. Its data are loaded
// when the view is opened.

import { processMemory } from "../charts/process_memory.js";
import { stepChart } from "../charts/step_chart.js";
import { element } from "../lib/dom.js";
import { duration, exact, longDuration, percent } from "../lib/format.js";
import { fillWhenLoaded } from "../lib/loading.js";
import { categoriesOf } from "../lib/run.js";
import { stateOfModules } from "../lib/module_link.js";
import { amounts, plainTable, texts, valued } from "../table/plain_table.js";
import { drawWindow, figure, stacked } from "./window.js";

/** @type {View} */
export const run = { id: "run", label: "Run", draw: drawRun, isSized: true, ofOneRank: true };

const FIRST_CARDS = 3;
const LISTED = 20;
const OTHERS = " – not reported as issues; the times are no savings";
/** @type {Record<string, string>} */
const LINKS = { run: "step chart", modules: "modules", memory: "memory", ranks: "ranks", timeline: "timeline" };

// Listing the windows again makes new ones, so their run is loaded again.
/** @type {WeakMap<ProfileWindow, Promise<RunShown>>} */
const loaded = new WeakMap();

// State: all, whether all cards are shown.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawRun(payload, context) {
  const { window } = context;
  const node = element("section", { class: "run", "aria-label": "run in time" });
  fillWhenLoaded(
    node, loaded, window, () => context.source.run(window),
    (data) => [...firstScreen(data, context), drawWindow(payload, data.screen, context), ...wholeRun(data)], "The run",
  );
  return node;
}

// The first screen and the whole run. A page of a ledger alone has no other views, and so no context.
/** @type {(data: RunShown) => HTMLElement[]} */
export function drawnRun(data) {
  return [...firstScreen(data, null), ...wholeRun(data)];
}

/** @type {(data: RunShown, context: Context | null) => HTMLElement[]} */
function firstScreen({ screen, steps: ofWindow, ledger }, context) {
  const groups = ledger?.ledger.step_groups.length ? ledger.ledger.step_groups : ofWindow;
  const { title, header, confidence, figures, trained, steps, phases, hint, ranks } = screen;
  const chart = groups.length ? element("div", { id: "steps" }, element("h2", {}, "Step time"), stepChart(groups, steps, phases.some(({ name }) => name === "recompute"))) : null;
  const openModules = (/** @type {string} */ name) => context?.go("modules", stateOfModules(name));
  return [
    element("div", { class: "run-head" }, element("p", {}, element("b", {}, title), ...header.map((text) => element("span", {}, text))), badge(confidence, "confidence", { saysWhy: true })),
    element("div", { class: "figures" }, ...figures.map((fact) => figure(fact))),
    ...(hint ? [element("p", { class: "hint" }, hint)] : []),
    ...(chart ? [chart] : []),
    doNext(screen, context),
    element(
      "div", { class: "where-and-ranks" },
      phases.length ? stacked("Where the step goes", phases, "", "phase", openModules) : element("div", {}),
      ranks.length ? dots(ranks, context) : element("div", {}),
    ),
    ...(trained ? [element("p", { class: "trained" }, trained)] : []),
  ];
}

// `saysWhy` shows the first reason of a low level without a click.
/** @type {(confidence: Confidence, label: string, options?: { saysWhy?: boolean }) => HTMLElement} */
function badge({ level, why }, label, { saysWhy = false } = {}) {
  const because = saysWhy && level === "low" && why.length ? `, ${why[0]}` : "";
  return element(
    "details", { class: `badge ${level}` }, element("summary", { "aria-label": `${label}: ${level}. Show why.` }, `${label}: ${level}${because}`),
    element("ul", {}, ...why.map((text) => element("li", {}, text))),
  );
}

/** @type {(screen: FirstScreen, context: Context | null) => HTMLElement} */
function doNext({ cards, nothing }, context) {
  const list = element("ol", { class: "cards" });
  const more = element("button", { type: "button", onclick: () => { fill(cards.length); if (context) { context.state.all = "true"; context.remember(); } } }, `${cards.length - FIRST_CARDS} more ${cards.length - FIRST_CARDS === 1 ? "finding" : "findings"}`);
  /** @type {(number: number) => void} */
  function fill(number) {
    const shown = cards.slice(0, number);
    const firstOther = cards.findLastIndex((card) => card.is_issue) + 1;
    list.replaceChildren(...shown.flatMap((card, at) => {
      const item = element("li", {}, cardOf(card, context));
      const heading = element("li", { class: "of-others" }, element("b", {}, "Where other time goes"), element("span", { class: "quiet" }, OTHERS));
      return at && at === firstOther ? [heading, item] : [item];
    }));
    more.hidden = number >= cards.length;
  }
  fill(context?.state.all ? cards.length : FIRST_CARDS);
  const isAnyIssue = cards.some((card) => card.is_issue);
  const meaning = isAnyIssue ? " – the time that each fix saves at most per step" : " – the times are per step";
  return element(
    "div", { class: "do-next" }, element("h2", {}, cards.length && !isAnyIssue ? "Where time goes" : "Do next", cards.length ? element("span", { class: "quiet" }, meaning) : null),
    ...(nothing ? [element("p", {}, nothing)] : []),
    ...(cards.length ? [list, more] : []),
  );
}

/** @type {(card: Card, context: Context | null) => HTMLElement} */
function cardOf({ title, text, action, sentence, view, module, confidence, is_issue: isIssue }, context) {
  const evidence = context && view !== "run" ? element("button", {
    type: "button", class: "leading", onclick: () => context.go(view, module && view === "modules" ? stateOfModules(module) : {}),
  }, LINKS[view] ?? view) : element("button", { type: "button", class: "leading", onclick: () => document.getElementById("steps")?.scrollIntoView({ behavior: "smooth" }) }, LINKS.run);
  return element(
    "div", { class: `action-card ${isIssue ? "" : "minor"}` },
    element("span", { class: "saving" }, text),
    element("div", {}, element("b", { class: "cause" }, title), element("p", { class: "sentence" }, sentence)),
    element("span", { class: "action" }, action ? `${action}.` : ""),
    element("span", { class: "evidence" }, evidence),
    ...(isIssue ? [badge(confidence, "confidence")] : []),
  );
}

// A dot for each rank, larger and marked if the others wait for it.
/** @type {(ranks: RankDot[], context: Context | null) => HTMLElement} */
function dots(ranks, context) {
  const most = ranks.reduce((sum, { lost }) => Math.max(sum, lost), 0);
  return element(
    "div", { class: "dots-of-ranks" }, element("h2", {}, "Ranks"),
    element("div", {}, ...ranks.map(({ rank, lost, said, status }) => element("button", {
      type: "button", class: `rank-dot ${lost ? "slow" : ""} ${status === "ok" ? "" : "missing"}`, title: said, "aria-label": said,
      style: { opacity: lost && most ? 0.5 + (0.5 * lost) / most : 1 }, onclick: () => context?.go("ranks"),
    }, String(rank)))),
    ...ranks.filter(({ lost }) => lost).map(({ said }) => element("p", { class: "remark" }, said)),
  );
}

/** @type {(data: RunShown) => HTMLElement[]} */
function wholeRun({ ledger: shown }) {
  if (!shown) return [];
  const { slow_steps: slow, starts } = shown.ledger;
  const costliest = [...slow].sort((a, b) => b.cost - a.cost).slice(0, LISTED);
  const memory = processMemory(shown.ledger);
  return [
    element("h2", {}, `Every second of the run: ${shown.title}`), ...account(shown),
    ...(memory ? [element("h2", {}, "Memory of the process"), memory] : []),
    ...(slow.length ? [
      element("h2", {}, costliest.length < slow.length ? `The ${LISTED} most expensive of ${exact(slow.length)} slow steps` : "Slow steps"),
      plainTable("slow steps", [...amounts("step", "cost", "time", "usual time"), ...texts("cause")], costliest.map(({ step, cost, seconds, usual, cause }) => [
        valued(step, exact), valued(cost, duration), valued(seconds, duration), valued(usual, duration), shown.causes[cause] ?? cause,
      ])),
    ] : []),
    element("h2", {}, "Starts of the run"),
    plainTable("starts", [...amounts("began after", "lasted", "steps"), ...texts("how it ended")], starts.map((each) => [
      valued(each.begin - starts[0].begin, longDuration), valued(each.seconds, longDuration),
      stepsOf(each), each.ended,
    ])),
  ];
}

// The numbers of the steps of a start, from 0.
/** @type {(start: Start) => string} */
function stepsOf({ first_step: first, last_step: end }) {
  return end > first ? `${exact(first)} to ${exact(end - 1)}` : "–";
}

// The ledger as one bar, and a list of its categories with their phases or causes.
/** @type {(data: LedgerShown) => HTMLElement[]} */
function account(data) {
  const [categories, { total }] = [categoriesOf(data), data.ledger];
  const bar = element("div", { class: "stack", role: "img", "aria-label": `time of the run: ${categories.map(({ label, seconds }) => `${label} ${percent(seconds / total)}`).join("; ")}` });
  const list = element("ul", { class: "parts" });
  for (const { name, label, seconds, parts } of categories) {
    const background = `var(--run-${CSS.escape(name)}, var(--rest))`;
    const text = `${longDuration(seconds)}, ${percent(seconds / total)}`;
    bar.append(element("div", { class: "slice", style: { flexGrow: seconds, flexBasis: 0, background }, title: `${label}: ${text}` }, element("span", {}, label)));
    const inner = parts.map(([part, value]) => `${part} ${longDuration(value)}`).join(", ");
    list.append(element(
      "li", {}, element("span", { class: "key", style: { background } }), `${label} ${text}`, inner ? element("div", { class: "quiet remark" }, inner) : null,
    ));
  }
  return [bar, list];
}
