// The view Compare: the window that all views show, against an earlier one that is chosen here. Python compares them; this draws it.

import { changes, differs, isChanged, ratioOf } from "./compare_table.js";
import { element } from "../lib/dom.js";
import { between, count, duration, exact, percent, signed, size } from "../lib/format.js";
import { isSameWindow, nearest, windowChoices } from "../shell/windows.js";

export const compare = { id: "compare", label: "Compare", draw: drawCompare };

const OF_MODULES = ["forward", "backward"]; // phases that the modules' times show more exactly

// Its state: run, tag and step of the other window; show, filter, sort, down.
function drawCompare(payload, context) {
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

  function pick(other, key, value) {
    Object.assign(state, { run: other.run, tag: other.tag, step: String(other.step), [key]: value });
    remember();
    fill();
  }

  async function fill() {
    const other = state.run ? nearest(others, state) : windowBefore(listed.windows, others, window);
    choices.replaceChildren(
      element("span", {}, "compare with"), ...windowChoices(others, other, (key, value) => pick(other, key, value), "compare with "),
      element("span", { class: "said" }, "as before; the window chosen above is after"),
    );
    asked += 1;
    const mine = asked;
    body.replaceChildren(element("p", { class: "message" }, "Loading…"));
    try {
      const comparison = await source.compare(other, window);
      if (mine !== asked) return;
      body.replaceChildren(sentences(comparison), figuresOfBoth(comparison), changes(comparison.modules, context));
    } catch (error) {
      if (mine === asked) body.replaceChildren(element("p", { class: "message" }, `These windows cannot be compared: ${error.message}`));
    }
  }

  fill();
  node.append(choices, body);
  return node;
}

// The last one before it, of the same run and stage if there is one.
function windowBefore(windows, others, window) {
  const before = windows.slice(0, windows.findIndex((each) => isSameWindow(each, window)));
  return nearest(before.length ? before : others, { run: String(window.run), tag: String(window.tag) });
}

// In words: how much slower or faster all modules are, which phases changed, and whether the work did.
function sentences(comparison) {
  const either = (values) => values.map((value) => value ?? "unknown").join(" → ");
  const doubts = Object.entries(comparison.facts).map(([name, values]) => `${name.replaceAll("_", " ")}: ${either(values)}`);
  return element(
    "div", { class: "sentences" },
    doubts.length ? element("p", { class: "doubt", role: "note" }, `Not under the same circumstances. ${doubts.join("; ")}.`) : null,
    element("ul", {}, ...[timeSentence(comparison), ...phaseSentences(comparison), workSentence(comparison)].map((text) => element("li", {}, text))),
  );
}

function timeSentence({ whole, step }) {
  const median = whole && `as the median of ${whole.modules} modules; what a module does beyond that is its own`;
  if (whole) return `The whole run is ${pace(whole.ratio)}, ${median}.`;
  if (step.ratio === null) return "Times are not compared: one of the two windows has none.";
  return `The step is ${pace(step.ratio)}; modules are not judged: those that did the same work in both are too few.`;
}

function phaseSentences({ phases, whole }) {
  return Object.entries(phases).filter(([name, time]) => isChanged(time) && !(whole && OF_MODULES.includes(name))).map(([name, time]) => {
    const much = `${percent(Math.abs(time.beyond - 1))} (${between(time)}) ${time.verdict}`;
    const cost = `${duration(Math.abs(time.lost))} a step ${time.lost > 0 ? "lost" : "won"}`;
    return `${name} is ${much}${whole ? " than the rest of the run" : ""}: ${cost}.`;
  });
}

function workSentence({ figures }) {
  const [macs, flops, bytes] = ["macs", "flops", "bytes_moved"].map((name) => changeOf(figures[name]));
  if (macs.before === null || macs.after === null) return "Work is not compared: one of the two windows has times alone.";
  const changed = [["MACs", macs, count], ["FLOPs", flops, count], ["bytes moved", bytes, size]].find(([, change]) => differs(change));
  if (!changed) return "The work is the same in all.";
  const [name, change, unit] = changed;
  return `The work changed: ${name} went from ${unit(change.before)} to ${unit(change.after)}, ${signed(ratioOf(change))}.`;
}

function pace(ratio) {
  const text = percent(Math.abs(ratio - 1));
  return text === "0 %" || text === "<0.1 %" ? "as fast as before" : `${text} ${ratio > 1 ? "slower" : "faster"}`;
}

function changeOf([before, after]) {
  return { before, after };
}

const FIGURES = [
  ["mfu", "MFU", percent], ["samples_per_second", "samples/s", count], ["tokens_per_second", "tokens/s", count],
  ["peak_bytes", "peak live memory", size], ["macs", "MACs", count], ["parameters", "parameters", count],
];

function figuresOfBoth({ step, figures }) {
  const all = [["step", step, duration], ...FIGURES.map(([name, label, text]) => [label, changeOf(figures[name]), text])];
  const known = all.filter(([, { before, after }]) => before !== null || after !== null);
  return element("div", { class: "figures" }, ...known.map(([label, change, text]) => {
    const much = differs(change) ? signed(ratioOf(change)) : change.before === change.after ? "the same" : "–";
    return element(
      "div", { class: `figure ${change.verdict ?? ""}`, title: `${exact(change.before)} → ${exact(change.after)}` },
      element("div", { class: "figure-label" }, label),
      element("div", { class: "figure-value" }, text(change.after)),
      element("div", { class: "remark" }, `was ${text(change.before)}`),
      element("div", { class: "remark" }, change.low ? `${much} (${between(change)})` : much),
    );
  }));
}
