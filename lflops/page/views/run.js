// The view Run: the seconds of a run by category, its steps and memory over time, its slow steps and its starts. Its data are loaded when the
// view is opened.

import { runChart } from "../charts/run_chart.js";
import { element } from "../lib/dom.js";
import { duration, exact, longDuration, messageOf, percent } from "../lib/format.js";
import { categoriesOf } from "../lib/run.js";
import { amounts, plainTable, texts, valued } from "../table/plain_table.js";

/** @type {View} */
export const run = { id: "run", label: "Run", draw: drawRun, isSized: true };

const ELSEWHERE = "This file has a single window. `lflops ledger DIR --html OUT` writes a page of the whole run.";
const DRAWN = "The line is the mean step over a few seconds, or over longer intervals at the beginning of the run. A dot is a slow step. A band is the time until a restart.";
const LISTED = 20;

/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawRun(_payload, { source, window }) {
  const node = element("section", { class: "run", "aria-label": "run in time" });
  if (!source.ledger) {
    node.append(element("p", { class: "message" }, ELSEWHERE));
    return node;
  }
  node.append(element("p", { class: "message" }, "Loading…"));
  source.ledger(window).then(
    (data) => node.replaceChildren(...drawnRun(data)),
    (error) => node.replaceChildren(element("p", { class: "message" }, `The run cannot be shown: ${messageOf(error)}`)),
  );
  return node;
}

/** @type {(data: RunShown) => HTMLElement[]} */
export function drawnRun(data) {
  const { slow_steps: slow, starts } = data.ledger;
  const costliest = [...slow].sort((a, b) => b.cost - a.cost).slice(0, LISTED);
  return [
    element("h2", {}, data.title),
    ...(data.said.length ? [element("ul", { class: "said" }, ...data.said.map((text) => element("li", {}, text)))] : []),
    ...account(data),
    element("h2", {}, "Steps and memory over time"), runChart(data),
    element("p", { class: "remark" }, DRAWN),
    ...(slow.length ? [
      element("h2", {}, costliest.length < slow.length ? `The ${LISTED} most expensive of ${exact(slow.length)} slow steps` : "Slow steps"),
      plainTable("slow steps", [...amounts("step", "took", "usual"), ...texts("cause")], costliest.map(({ step, seconds, usual, cause }) => [
        valued(step, exact), valued(seconds, duration), valued(usual, duration), data.causes[cause] ?? cause,
      ])),
    ] : []),
    element("h2", {}, "Starts"),
    plainTable("starts", [...amounts("began after", "took", "steps"), ...texts("ended")], starts.map((each) => [
      valued(each.begin - starts[0].begin, longDuration), valued(each.seconds, longDuration),
      `${each.first_step + 1} to ${each.last_step}`, each.ended,
    ])),
  ];
}

// The ledger as one bar, and a list of its categories with their phases or causes.
/** @type {(data: RunShown) => HTMLElement[]} */
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
