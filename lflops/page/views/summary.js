// The view Summary: the verdict, the budget of the step's peak-seconds right below it, the step's phases, the large figures with their trends,
// and a table of the rest. With one rank chosen, its figures come first.

import { element } from "../lib/dom.js";
import { explanation } from "../lib/explanations.js";
import { count, duration, percent, size } from "../lib/format.js";
import { stateOfModules } from "../lib/module_link.js";
import { tracesOf } from "./traces.js";
import { trend } from "../charts/trend.js";

/** @type {View} */
export const summary = { id: "summary", label: "Summary", draw: drawSummary, ofOneRank: true };

const OPEN = 3; // parts of the budget with their advice
const WORTH = 0.01; // of the step: advice for less would be noise

/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawSummary(payload, { source, listed, window, rank, follow, go }) {
  const { figures: usual, verdict, budget, phases, facts: lines, doubts, why_no_budget: whyNoBudget } = payload.summary;
  const figures = rank === null || !payload.ranks ? usual : figuresOfRank(usual, payload.ranks.ranks, rank);
  const cards = element("div", { class: "figures" });
  const fill = (/** @type {ProfileWindow[]} */ windows) => cards.replaceChildren(...figures.map((each) => figure(each, trend(each.label, windows, window))));
  fill(listed.windows);
  follow(fill);
  const [first, ...others] = verdict;
  /** @type {(name: string) => void} */
  const openModules = (name) => go("modules", stateOfModules(name));
  return element(
    "section", { class: "summary", "aria-label": "summary" },
    payload.partial ? element("p", { class: "doubt", role: "note" }, "Partial: training ended before this window did.") : null,
    verdict.length ? element("p", { class: "verdict" }, element("strong", {}, first), others.length ? ` ${others.join(" ")}` : "") : null,
    doubts ? element("p", { class: "doubt", role: "note" }, `${doubts === 1 ? "1 note makes" : `${doubts} notes make`} the figures less reliable: see the table below.`) : null,
    stacked("Where the step's peak-seconds went", budget, whyNoBudget, "budget", openModules),
    stacked("The step by phase", phases, "no clean step was timed", "phase", openModules),
    cards,
    rank === null ? null : element("p", { class: "remark" }, `The figures of rank ${rank} come first. The rest is of the whole run.`),
    tracesOf(payload, source),
    element("h2", {}, "All figures and facts"),
    facts(lines),
  );
}

/** @type {(figure: Figure, over?: HTMLElement | null) => HTMLElement} */
export function figure({ label, text, remark }, over = null) {
  return element(
    "div", { class: "figure", title: explanation(label.replace(/, rank \d+$/, "")) || null },
    element("div", { class: "figure-label" }, label), element("div", { class: "figure-value" }, text), element("div", { class: "remark" }, remark), over,
  );
}

// Parts of the step as one bar, and a list of them with their modules and what usually helps.
/** @type {(title: string, parts: Part[], missing: string, kind: string, openModules: (name: string) => void) => HTMLElement} */
function stacked(title, parts, missing, kind, openModules) {
  const heading = element("h2", {}, title);
  if (!parts.length) return element("div", {}, heading, element("p", { class: "remark" }, `Unknown: ${missing}.`));
  const bar = element("div", { class: "stack", role: "img", "aria-label": `${title}: ${parts.map(({ name, text }) => `${name} ${text}`).join("; ")}` });
  const list = element("ul", { class: `parts parts-of-${kind}` });
  parts.forEach(({ name, share, text, advice, modules }, at) => {
    const colour = `${kind}-${name.replaceAll(" ", "-")}`;
    const slice = element("div", { class: name === "unaccounted" ? "slice unaccounted" : "slice", style: { flexGrow: share, flexBasis: 0 }, title: `${name}: ${text}` });
    if (name !== "unaccounted") paint(slice, colour);
    slice.append(element("span", {}, name));
    if (share) bar.append(slice);
    const key = element("span", { class: name === "unaccounted" ? "key unaccounted" : "key" });
    if (name !== "unaccounted") paint(key, colour);
    const links = modules.flatMap(([pattern, part], index) => [
      index ? ", " : "",
      element("button", { type: "button", class: "leading", title: "its rows in Modules", onclick: () => openModules(pattern) }, pattern || "(root)"),
      ` ${percent(part)}`,
    ]);
    const isOpen = kind === "budget" ? at < OPEN : name === "unaccounted";
    list.append(element(
      "li", {}, key, element("b", {}, name), ` ${text}`,
      isOpen && links.length ? element("div", { class: "quiet" }, "in ", ...links) : null,
      isOpen && advice && share >= WORTH ? element("div", { class: "quiet" }, `${advice}.`) : null,
    ));
  });
  return element("div", {}, heading, bar, list);
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
    list.append(element("dt", { title: explanation(label) || null }, label), element("dd", doubt ? { class: "doubt" } : {}, text));
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
    const among = least === most ? "the same on all ranks that reported" : `all ranks: ${least} to ${most}`;
    return { label: `${label}, rank ${rank}`, text: text(table[field][row]), remark: [of, among].filter(Boolean).join("; ") };
  });
  const rest = all.filter(({ label }) => !replaced.has(label));
  return [...own, ...rest.map((each) => ({ ...each, remark: ["of the whole run", each.remark].filter(Boolean).join(", ") }))];
}
