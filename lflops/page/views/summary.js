// A profile at a glance: the figures, the step cut into its phases, where its peak-seconds went, and what to know beside that.

import { element } from "../lib/dom.js";
import { percent } from "../lib/format.js";
import { figuresOfRank } from "./one_rank.js";
import { tracesOf } from "./traces.js";
import { trend } from "../charts/trend.js";

export const summary = { id: "summary", label: "Summary", draw: drawSummary, ofOneRank: true };

function drawSummary(payload, { source, listed, window, rank }) {
  const figures = rank === null ? payload.summary.figures : figuresOfRank(payload.summary.figures, payload.ranks.ranks, rank);
  return element(
    "section", { class: "summary", "aria-label": "summary" },
    payload.partial ? element("p", { class: "doubt", role: "note" }, "Partial: the run was left before this window was over.") : null,
    element("div", { class: "figures" }, ...figures.map((each) => figure(each, trend(each.label, listed.windows, window)))),
    rank === null ? null : element("p", { class: "remark" }, `What rank ${rank} told by itself comes first; all else here is of the whole run.`),
    block("The step", payload.summary.phases, "no clean step was timed", "phase"),
    block("Where its peak-seconds went", payload.summary.budget, payload.summary.why_no_budget, "budget"),
    tracesOf(payload, source),
    element("h2", {}, "What this is"),
    facts(payload.summary.facts),
  );
}

export function figure({ label, text, remark }, over = null) {
  return element(
    "div", { class: "figure" },
    element("div", { class: "figure-label" }, label), element("div", { class: "figure-value" }, text), element("div", { class: "remark" }, remark), over,
  );
}

function block(title, parts, missing, kind) {
  const heading = element("h2", {}, title);
  if (!parts.length) return element("div", {}, heading, element("p", { class: "remark" }, `Unknown: ${missing}.`));
  const bar = element("div", { class: "stack", role: "img", "aria-label": `${title}: ${parts.map(({ name, text }) => `${name} ${text}`).join("; ")}` });
  const list = element("ul", { class: "parts" });
  for (const { name, share, text, said } of parts) {
    const colour = `${kind}-${name.replaceAll(" ", "-")}`;
    const slice = element("div", { class: "slice", style: { flexGrow: share, flexBasis: 0 }, title: `${name}: ${text}` });
    paint(slice, colour);
    slice.append(element("span", {}, name));
    bar.append(slice);
    const key = element("span", { class: "key" });
    paint(key, colour);
    list.append(element("li", {}, key, element("b", {}, name), ` ${text}`, said ? element("div", { class: "said" }, said) : null));
  }
  const sum = parts.reduce((all, { share }) => all + share, 0);
  const rest = percent(sum) === percent(1) ? null : `Each is a median over the steps: together they are ${percent(sum)} of the median step.`;
  return element("div", {}, heading, bar, list, rest === null ? null : element("p", { class: "remark" }, rest));
}

// A name of one's own, as a scope's, has no colour in the style sheet: it gets that of what is left.
function paint(node, colour) {
  node.style.background = `var(--${CSS.escape(colour)}, var(--rest))`;
}

function facts(lines) {
  const list = element("dl", { class: "facts" });
  for (const { label, text, doubt } of lines) {
    list.append(element("dt", {}, label), element("dd", doubt ? { class: "doubt" } : {}, text));
  }
  return list;
}
