// The view Summary: the verdict, the step breakdown, the phases of the step, large figures with their trends, and a table of all other facts.
// If a rank is chosen, its figures come first.

import { colourOfPart } from "../lib/colours.js";
import { element } from "../lib/dom.js";
import { explanation } from "../lib/explanations.js";
import { count, duration, percent, size } from "../lib/format.js";
import { stateOfModules } from "../lib/module_link.js";
import { tracesOf } from "./traces.js";
import { trend } from "../charts/trend.js";

/** @type {View} */
export const summary = { id: "summary", label: "Summary", draw: drawSummary, ofOneRank: true };

const OPEN = 3; // parts of the breakdown that have advice
const WORTH = 0.01; // the smallest share of the step that has advice

/** The figures that are shown large, in this order. */
const LARGE = ["step", "pass", "least time", "MFU", "samples/s", "tokens/s", "peak live memory", "memory needed"];

/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawSummary(payload, { source, listed, window, rank, follow, go }) {
  const { verdict, subject, speed, model, breakdown, why_no_breakdown: whyNoBreakdown, remarks } = payload.report;
  const all = [...speed, ...model];
  const usual = LARGE.flatMap((name) => all.filter((fact) => fact.name === name));
  const figures = rank === null || !payload.ranks ? usual : figuresOfRank(usual, payload.ranks.ranks, rank);
  const step = speed[0]?.name;
  const cards = element("div", { class: "figures" });
  const fill = (/** @type {ProfileWindow[]} */ windows) => cards.replaceChildren(...figures.map((each) => figure(each, trend(each.label, windows, window))));
  fill(listed.windows);
  follow(fill);
  /** @type {(name: string) => void} */
  const openModules = (name) => go("modules", stateOfModules(name));
  const phases = speed.filter(({ of }) => step && of === step).map((fact) => ({ ...fact, text: `${percent(fact.share ?? 0)}, ${fact.text}`, share: fact.share ?? 0 }));
  return element(
    "section", { class: "summary", "aria-label": "summary" },
    payload.partial ? element("p", { class: "caveat", role: "note" }, "Partial: the training run ended before this window.") : null,
    said(verdict),
    breakdown.length ? stacked("Where the step's time went", breakdown, "", "breakdown", openModules) : null,
    stacked("The step by phase", phases, "no unprofiled step was timed", "phase", openModules),
    breakdown.length ? null : stacked("Where the step's time went", breakdown, whyNoBreakdown, "breakdown", openModules),
    cards,
    rank === null ? null : element("p", { class: "remark" }, `The figures of rank ${rank} come first. All other figures are those of the whole run.`),
    tracesOf(payload, source),
    element("h2", { id: "facts" }, "All figures and facts"),
    facts([...all.filter((fact) => !usual.includes(fact) && fact.of !== step), ...subject, ...remarks]),
  );
}

// The verdict, its reasons, what to do next, and the confidence, which links to the notes below.
/** @type {(verdict: Verdict) => HTMLElement} */
function said({ said: first, judgement, why, also, next, caveat, confidence: basisOfFigures, caveats }) {
  const confidence = [caveat, basisOfFigures].filter(Boolean).join("; ");
  /** @type {(label: string, lines: (string | HTMLElement)[]) => (HTMLElement | null)[]} */
  const rows = (label, lines) => (lines.length ? [element("dt", {}, label), element("dd", {}, ...lines.map((line) => element("div", {}, line)))] : []);
  const basis = caveats ? element("a", { class: "caveat", href: "#facts", onclick: toFacts }, confidence) : confidence;
  const top = element("strong", {}, judgement ? `${first} ${judgement}` : first);
  return element(
    "dl", { class: "verdict" }, element("dt", {}, "verdict"), element("dd", {}, top), ...rows("why", why), ...rows("also", also), ...rows("next", next),
    ...rows("confidence", confidence ? [basis] : []),
  );
}

// The part of the address after the # is the state of the page, so this is not a real link.
/** @type {(event: Event) => void} */
function toFacts(event) {
  event.preventDefault();
  document.getElementById("facts")?.scrollIntoView({ behavior: "smooth" });
}

/** @type {(figure: { label: string, text: string, remark: string }, over?: HTMLElement | null) => HTMLElement} */
export function figure({ label, text, remark }, over = null) {
  return element(
    "div", { class: "figure", title: explanation(label.replace(/, rank \d+$/, "")) || null },
    element("div", { class: "figure-label" }, label), element("div", { class: "figure-value" }, text), element("div", { class: "remark" }, remark), over,
  );
}

// Parts of the step as one bar, and a list of them with their modules and advice.
/** @type {(title: string, parts: { name: string, label: string, share: number, text: string, advice?: string, modules?: [string, number][] }[], missing: string, kind: string, openModules: (name: string) => void) => HTMLElement} */
function stacked(title, parts, missing, kind, openModules) {
  const heading = element("h2", {}, title);
  if (!parts.length) return element("div", {}, heading, element("p", { class: "remark" }, `Unknown: ${missing}.`));
  const bar = element("div", { class: "stack", role: "img", "aria-label": `${title}: ${parts.map(({ label, text }) => `${label} ${text}`).join("; ")}` });
  const list = element("ul", { class: `parts parts-of-${kind}` });
  parts.forEach(({ name, label, share, text, advice, modules = [] }, at) => {
    const background = colourOfPart(name);
    const slice = element("div", { class: "slice", style: { flexGrow: share, flexBasis: 0, background }, title: `${label}: ${text}` });
    slice.append(element("span", {}, label));
    if (share) bar.append(slice);
    const key = element("span", { class: "key", style: { background } });
    const links = modules.flatMap(([pattern, part], index) => [
      index ? ", " : "",
      element("button", { type: "button", class: "leading", title: "show its rows in Modules", onclick: () => openModules(pattern) }, pattern || "(model)"),
      ` ${percent(part)}`,
    ]);
    list.append(element(
      "li", {}, key, element("b", {}, label), ` ${text}`,
      at < OPEN && links.length ? element("div", { class: "quiet" }, "in ", ...links) : null,
      at < OPEN && advice && share >= WORTH ? element("div", { class: "quiet" }, `${advice}.`) : null,
    ));
  });
  return element("div", {}, heading, bar, list);
}

/** @type {(lines: Fact[]) => HTMLElement} */
function facts(lines) {
  const list = element("dl", { class: "facts" });
  for (const { label, text, remark, is_caveat } of lines) {
    const value = [text, remark].filter(Boolean).join(", ");
    list.append(element("dt", { title: explanation(label) || null }, label), element("dd", is_caveat ? { class: "caveat" } : {}, value));
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

// The figures of the rank, each with the range of all ranks, then figures of the whole run, marked as such.
/** @type {(all: Fact[], table: Lists, rank: number) => { label: string, text: string, remark: string }[]} */
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
