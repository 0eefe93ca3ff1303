// Two windows side by side: the one that all views show, and the one before it that is chosen here.

import { changes } from "./compare_table.js";
import { differences, differs, ratioOf } from "../compare/differences.js";
import { element } from "../lib/dom.js";
import { between, count, duration, exact, percent, signed, size } from "../lib/format.js";
import { isNews } from "../compare/judging.js";
import { isSameWindow, nearest, windowChoices } from "../shell/windows.js";

export const compare = { id: "compare", label: "Compare", draw: drawCompare };

const OF_MODULES = ["forward", "backward"]; // phases that the modules tell of more exactly

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
      const before = await source.read(other);
      if (mine !== asked) return;
      if (before.lflops !== payload.lflops) throw new Error(`its form is ${before.lflops}, this page draws ${payload.lflops}`);
      const found = differences(before, payload);
      body.replaceChildren(storyOf(found), figuresOfBoth(found), changes(found, before, payload, context));
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

// In words: what all modules have in common, which phases changed, and whether the work did.
function storyOf(found) {
  const either = (values) => values.map((value) => value ?? "unknown").join(" → ");
  const doubts = Object.entries(found.facts).map(([name, values]) => `${name.replaceAll("_", " ")}: ${either(values)}`);
  return element(
    "div", { class: "told" },
    doubts.length ? element("p", { class: "doubt", role: "note" }, `Not under the same circumstances. ${doubts.join("; ")}.`) : null,
    element("ul", {}, ...[...timesTold(found), ...phasesTold(found), workTold(found)].map((text) => element("li", {}, text))),
  );
}

function timesTold({ whole, step }) {
  const median = whole && `as the median of ${whole.modules} modules; what a module does beyond that is its own`;
  if (whole) return [`The whole run is ${paceTold(whole.ratio)}, ${median}.`];
  if (step.ratio === null) return ["Times are not compared: one of the two windows has none."];
  return [`The step is ${paceTold(step.ratio)}; modules are not judged: those that did the same work in both are too few.`];
}

function phasesTold({ phases: all, whole }) {
  return Object.entries(all).filter(([name, time]) => isNews(time) && !(whole && OF_MODULES.includes(name))).map(([name, time]) => {
    const much = `${percent(Math.abs(time.beyond - 1))} (${between(time)}) ${time.verdict}`;
    const cost = `${duration(Math.abs(time.lost))} a step ${time.lost > 0 ? "lost" : "won"}`;
    return `${name} is ${much}${whole ? " than the rest of the run" : ""}: ${cost}.`;
  });
}

function workTold({ modules }) {
  const { macs, flops, bytes_moved: bytes } = modules[0].inclusive;
  if (macs.before === null || macs.after === null) return "Work is not compared: one of the two windows has times alone.";
  const changed = [["MACs", macs, count], ["FLOPs", flops, count], ["bytes moved", bytes, size]].find(([, change]) => differs(change));
  if (!changed) return "The work is the same in all.";
  const [name, change, unit] = changed;
  return `The work changed: ${name} went from ${unit(change.before)} to ${unit(change.after)}, ${signed(ratioOf(change))}.`;
}

function paceTold(ratio) {
  const text = percent(Math.abs(ratio - 1));
  return text === "0 %" || text === "<0.1 %" ? "as fast as before" : `${text} ${ratio > 1 ? "slower" : "faster"}`;
}

function figuresOfBoth(found) {
  const { macs, parameters } = found.modules[0].inclusive;
  const all = [
    ["step", found.step, duration], ["MFU", found.mfu, percent],
    ["samples/s", found.samples_per_second, count], ["tokens/s", found.tokens_per_second, count],
    ["peak live memory", found.peak_bytes, size], ["MACs", macs, count], ["parameters", parameters, count],
  ];
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
