// The view Compare: the window that all views show, against an earlier one that is chosen here. Python compares them; this draws it.

import { changes, differs, isChanged, ratioOf } from "./compare_table.js";
import { element } from "../lib/dom.js";
import { between, count, duration, exact, messageOf, percent, signed, size } from "../lib/format.js";
import { isSameWindow, nearest, windowChoices } from "../lib/windows.js";

/** @type {View} */
export const compare = { id: "compare", label: "Compare", draw: drawCompare };

const OF_MODULES = ["forward", "backward"]; // phases that the modules' times show more exactly

// Its state: run, tag and step of the other window; show, filter, sort, down.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawCompare(_payload, context) {
  const { state, remember, source, listed, window } = context;
  const others = listed.windows.filter((each) => !isSameWindow(each, window));
  const node = element("section", { class: "compare", "aria-label": "compare" });
  if (!others.length) {
    node.append(element(
      "p", { class: "message" }, "There is no other window to compare this one with. In TensorBoard every window of every run can be chosen ",
      "here, as soon as a second one was logged; as a file, ", element("code", {}, "lflops html BEFORE AFTER"), " writes a page with two.",
    ));
    return node;
  }
  const choices = element("div", { class: "bar-of-controls", role: "group", "aria-label": "compare with" });
  const body = element("div", { class: "compared" });
  let asked = 0;

  /** @type {(other: ProfileWindow, key: string, value: string) => void} */
  function pick(other, key, value) {
    Object.assign(state, { run: other.run, tag: other.tag, step: String(other.step), [key]: value });
    remember();
    fill();
  }

  async function fill() {
    const other = (state.run ? nearest(others, state) : windowBefore(listed.windows, others, window)) ?? others[0];
    choices.replaceChildren(
      element("span", {}, "compare with"), ...windowChoices(others, other, (key, value) => pick(other, key, value), "compare with "),
      element("span", { class: "quiet" }, "as before; the window chosen above is after"),
    );
    asked += 1;
    const mine = asked;
    body.replaceChildren(element("p", { class: "message" }, "Loading…"));
    try {
      const comparison = await source.compare(other, window);
      if (mine !== asked) return;
      body.replaceChildren(sentences(comparison), figuresOfBoth(comparison), changes(comparison.modules, context));
    } catch (error) {
      if (mine === asked) body.replaceChildren(element("p", { class: "message" }, `These windows cannot be compared: ${messageOf(error)}`));
    }
  }

  fill();
  node.append(choices, body);
  return node;
}

// The last window before the given one, of the same run and stage if there is one.
/** @type {(windows: ProfileWindow[], others: ProfileWindow[], window: ProfileWindow) => ProfileWindow | undefined} */
function windowBefore(windows, others, window) {
  const before = windows.slice(0, windows.findIndex((each) => isSameWindow(each, window)));
  return nearest(before.length ? before : others, { run: String(window.run), tag: String(window.tag) });
}

// In words: how much slower or faster all modules are, which phases changed, and whether the work did.
/** @type {(comparison: Comparison) => HTMLElement} */
function sentences(comparison) {
  /** @type {(values: Value[]) => string} */
  const either = (values) => values.map((value) => value ?? "unknown").join(" → ");
  const doubts = Object.entries(comparison.facts).map(([name, values]) => `${name.replaceAll("_", " ")}: ${either(values)}`);
  return element(
    "div", { class: "sentences" },
    doubts.length ? element("p", { class: "doubt", role: "note" }, `Not under the same circumstances. ${doubts.join("; ")}.`) : null,
    element("ul", {}, ...[timeSentence(comparison), ...phaseSentences(comparison), workSentence(comparison)].map((text) => element("li", {}, text))),
  );
}

/** @type {(comparison: Comparison) => string} */
function timeSentence({ whole, step }) {
  const median = whole && `as the median of ${whole.modules} modules; what a module does beyond that is its own`;
  if (whole) return `The whole run is ${pace(whole.ratio)}, ${median}.`;
  if (step.ratio === null) return "Times are not compared: one of the two windows has none.";
  return `The step is ${pace(step.ratio)}; modules are not judged: those that did the same work in both are too few.`;
}

/** @type {(comparison: Comparison) => string[]} */
function phaseSentences({ phases, whole }) {
  return Object.entries(phases).filter(([name, time]) => isChanged(time) && !(whole && OF_MODULES.includes(name))).map(([name, time]) => {
    const [beyond, lost] = [Number(time.beyond), Number(time.lost)];
    const much = `${percent(Math.abs(beyond - 1))} (${between(time)}) ${time.verdict}`;
    const cost = `${duration(Math.abs(lost))} a step ${lost > 0 ? "lost" : "won"}`;
    return `${name} is ${much}${whole ? " than the rest of the run" : ""}: ${cost}.`;
  });
}

/** @type {(comparison: Comparison) => string} */
function workSentence({ figures }) {
  const [macs, flops, bytes] = ["macs", "flops", "bytes_moved"].map((name) => changeOf(figures[name]));
  if (macs.before === null || macs.after === null) return "Work is not compared: one of the two windows has times alone.";
  /** @type {[string, Change, Format][]} */
  const all = [["MACs", macs, count], ["FLOPs", flops, count], ["bytes moved", bytes, size]];
  const changed = all.find(([, change]) => differs(change));
  if (!changed) return "The work is the same in all.";
  const [name, change, unit] = changed;
  return `The work changed: ${name} went from ${unit(change.before)} to ${unit(change.after)}, ${signed(ratioOf(change))}.`;
}

/** @type {(ratio: number) => string} */
function pace(ratio) {
  const text = percent(Math.abs(ratio - 1));
  return text === "0 %" || text === "<0.1 %" ? "as fast as before" : `${text} ${ratio > 1 ? "slower" : "faster"}`;
}

/** @type {(sides: [Count, Count]) => Change} */
function changeOf([before, after]) {
  return { before, after };
}

/** @type {[string, string, Format][]} */
const FIGURES = [
  ["mfu", "MFU", percent], ["samples_per_second", "samples/s", count], ["tokens_per_second", "tokens/s", count],
  ["peak_bytes", "peak live memory", size], ["macs", "MACs", count], ["parameters", "parameters", count],
];

/** @type {(comparison: Comparison) => HTMLElement} */
function figuresOfBoth({ step, figures }) {
  /** @type {[string, Change & Partial<Pick<Timing, "low" | "high" | "verdict">>, Format][]} */
  const all = [["step", step, duration]];
  for (const [name, label, text] of FIGURES) all.push([label, changeOf(figures[name]), text]);
  const known = all.filter(([, { before, after }]) => before !== null || after !== null);
  return element("div", { class: "figures" }, ...known.map(([label, change, text]) => {
    const much = differs(change) ? signed(ratioOf(change)) : change.before === change.after ? "the same" : "–";
    return element(
      "div", { class: `figure ${change.verdict ?? ""}`, title: `${exact(change.before)} → ${exact(change.after)}` },
      element("div", { class: "figure-label" }, label),
      element("div", { class: "figure-value" }, text(change.after)),
      element("div", { class: "remark" }, `was ${text(change.before)}`),
      element("div", { class: "remark" }, change.low ? `${much} (${between({ low: change.low, high: change.high ?? null })})` : much),
    );
  }));
}
