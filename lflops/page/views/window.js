// The profiled window, below the first screen: the parts of its step, its figures with their trends over the windows of the run, and all facts. If
// a rank is chosen, its figures come first.

import { colourOfPart } from "../lib/colours.js";
import { element } from "../lib/dom.js";
import { explanation } from "../lib/explanations.js";
import { count, duration, percent, size } from "../lib/format.js";
import { stateOfModules } from "../lib/module_link.js";
import { tracesOf } from "./traces.js";
import { trend } from "../charts/trend.js";

const OPEN = 3; // parts of the breakdown that have advice
const WORTH = 0.01; // the smallest share of the step that has advice

/** The figures that are shown large, in this order. */
const LARGE = ["step", "pass", "least time", "MFU", "samples/s", "tokens/s", "peak live memory", "memory needed"];

// Figures that the first screen has for the whole run have another name here.
/** @type {(payload: Payload, screen: FirstScreen, context: Context) => HTMLElement} */
export function drawWindow(payload, screen, { source, listed, window, rank, follow, go }) {
  const { subject, speed, model, breakdown, why_no_breakdown: whyNoBreakdown, remarks } = payload.report;
  const ofRun = screen.steps?.source === "run";
  /** @type {(fact: Fact) => Fact} */
  const named = (fact) => {
    if (!ofRun) return fact;
    return fact.of ? { ...fact, of: `${fact.of} of the window` } : { ...fact, label: `${fact.label} of the window` };
  };
  const all = [...speed, ...model];
  const usual = LARGE.flatMap((name) => all.filter((fact) => fact.name === name));
  const figures = rank === null || !payload.ranks ? usual.map(named) : figuresOfRank(usual, payload.ranks.ranks, rank);
  const cards = element("div", { class: "figures" });
  const fill = (/** @type {ProfileWindow[]} */ windows) => cards.replaceChildren(...figures.map((each) => figure(each, trend(each.name ?? each.label, windows, window))));
  fill(listed.windows);
  follow(fill);
  /** @type {(name: string) => void} */
  const openModules = (name) => go("modules", stateOfModules(name));
  return element(
    "div", { class: "of-window" },
    element("h2", {}, `The profiled ${payload.head.when || "pass"}`),
    payload.partial ? element("p", { class: "caveat", role: "note" }, "This window is incomplete, because the training run ended before the window did.") : null,
    cards,
    rank === null ? null : element("p", { class: "remark" }, `The figures of rank ${rank} come first. All other figures are those of the whole run.`),
    stacked("What limits the step of this window", breakdown, whyNoBreakdown, "breakdown", openModules),
    tracesOf(payload, source),
    element("h2", { id: "facts" }, "All figures and facts of the window"),
    facts([...all.filter((fact) => !usual.includes(fact)).map(named), ...subject, ...remarks]),
  );
}

/** @type {(figure: { name?: string, label: string, text: string, remark: string }, over?: HTMLElement | null) => HTMLElement} */
export function figure({ label, text, remark }, over = null) {
  return element(
    "div", { class: "figure", title: explanation(label.replace(/(, rank \d+| of the window)$/, "")) || null },
    element("div", { class: "figure-label" }, label), element("div", { class: "figure-value" }, text), element("div", { class: "remark" }, remark), over,
  );
}

// Parts of a step as one bar, and a list of them with their modules and advice.
/** @type {(title: string, parts: { name: string, label: string, share: number, text: string, advice?: string, modules?: [string, number][] }[], missing: string, kind: string, openModules: (name: string) => void) => HTMLElement} */
export function stacked(title, parts, missing, kind, openModules) {
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
      element("button", { type: "button", class: "leading", title: "show these modules in the view Modules", onclick: () => openModules(pattern) }, pattern || "(model)"),
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
  for (const { label, text, remark, of, share, is_caveat } of lines) {
    const part = of && share !== null ? `${percent(share)} of the ${of}` : "";
    const value = [text, part, remark].filter(Boolean).join(", ");
    list.append(element("dt", { title: explanation(label.replace(/ of the window$/, "")) || null }, label), element("dd", is_caveat ? { class: "caveat" } : {}, value));
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
/** @type {(all: Fact[], table: Lists, rank: number) => { name?: string, label: string, text: string, remark: string }[]} */
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
