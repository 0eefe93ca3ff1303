// The view Summary: the figures, the step's phases, the budget of its peak-seconds, and facts. With one rank chosen, its figures come first.

import { element } from "../lib/dom.js";
import { count, duration, percent, size } from "../lib/format.js";
import { tracesOf } from "./traces.js";
import { trend } from "../charts/trend.js";

/** @type {View} */
export const summary = { id: "summary", label: "Summary", draw: drawSummary, ofOneRank: true };

/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawSummary(payload, { source, listed, window, rank, follow }) {
  const figures = rank === null || !payload.ranks ? payload.summary.figures : figuresOfRank(payload.summary.figures, payload.ranks.ranks, rank);
  const cards = element("div", { class: "figures" });
  const fill = (/** @type {ProfileWindow[]} */ windows) => cards.replaceChildren(...figures.map((each) => figure(each, trend(each.label, windows, window))));
  fill(listed.windows);
  follow(fill);
  return element(
    "section", { class: "summary", "aria-label": "summary" },
    payload.partial ? element("p", { class: "doubt", role: "note" }, "Partial: the run was left before this window was over.") : null,
    cards,
    rank === null ? null : element("p", { class: "remark" }, `What rank ${rank} told by itself comes first; all else here is of the whole run.`),
    block("The step", payload.summary.phases, "no clean step was timed", "phase"),
    block("Where its peak-seconds went", payload.summary.budget, payload.summary.why_no_budget, "budget"),
    tracesOf(payload, source),
    element("h2", {}, "What this is"),
    facts(payload.summary.facts),
  );
}

/** @type {(figure: Figure, over?: HTMLElement | null) => HTMLElement} */
export function figure({ label, text, remark }, over = null) {
  return element(
    "div", { class: "figure" },
    element("div", { class: "figure-label" }, label), element("div", { class: "figure-value" }, text), element("div", { class: "remark" }, remark), over,
  );
}

/** @type {(title: string, parts: Part[], missing: string, kind: string) => HTMLElement} */
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
    list.append(element("li", {}, key, element("b", {}, name), ` ${text}`, said ? element("div", { class: "quiet" }, said) : null));
  }
  const sum = parts.reduce((all, { share }) => all + share, 0);
  const rest = percent(sum) === percent(1) ? null : `Each is a median over the steps: together they are ${percent(sum)} of the median step.`;
  return element("div", {}, heading, bar, list, rest === null ? null : element("p", { class: "remark" }, rest));
}

// A name of a user, as a scope's, has no colour in the style sheet: it gets that of the rest.
/** @type {(node: HTMLElement, colour: string) => void} */
function paint(node, colour) {
  node.style.background = `var(--${CSS.escape(colour)}, var(--rest))`;
}

/** @type {(lines: Line[]) => HTMLElement} */
function facts(lines) {
  const list = element("dl", { class: "facts" });
  for (const { label, text, doubt } of lines) {
    list.append(element("dt", {}, label), element("dd", doubt ? { class: "doubt" } : {}, text));
  }
  return list;
}

/** @type {{ field: string, label: string, text: Format, instead: string[], of?: string }[]} */
const OWN = [
  { field: "step", label: "step", text: duration, instead: ["step", "pass"] },
  { field: "data", label: "data wait", text: duration, instead: [] },
  { field: "cpu", label: "CPU time", text: duration, instead: ["CPU time"] },
  { field: "macs", label: "MACs", text: count, instead: ["MACs"], of: "forward and backward" },
  { field: "peak_bytes", label: "peak live memory", text: size, instead: ["peak live memory"] },
];

// The rank's own figures first, each with the range of all ranks; the others are marked as those of the whole run.
/** @type {(all: Figure[], table: Lists, rank: number) => Figure[]} */
function figuresOfRank(all, table, rank) {
  const row = table.rank.indexOf(rank);
  const replaced = new Set(OWN.flatMap(({ instead }) => instead));
  const own = OWN.map(({ field, label, text, of }) => {
    const known = table[field].filter((value) => value !== null).sort((a, b) => Number(a) - Number(b));
    const [least, most] = [known[0], known.at(-1)].map((value) => text(value ?? null));
    const among = least === most ? "the same on all ranks that told" : `all ranks: ${least} to ${most}`;
    return { label: `${label}, rank ${rank}`, text: text(table[field][row]), remark: [of, among].filter(Boolean).join("; ") };
  });
  const rest = all.filter(({ label }) => !replaced.has(label));
  return [...own, ...rest.map((each) => ({ ...each, remark: ["of the whole run", each.remark].filter(Boolean).join(", ") }))];
}
