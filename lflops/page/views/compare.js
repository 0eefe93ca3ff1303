// The view Compare: the window that all views show, compared with another window that is chosen here. Python computes the comparison.

import { changes, differs, ratioOf } from "./compare_table.js";
import { element } from "../lib/dom.js";
import { between, count, duration, exact, messageOf, ofPeak, perSecond, signed, size, words } from "../lib/format.js";
import { isSameWindow, nearest, windowChoices } from "../lib/windows.js";

/** @type {View} */
export const compare = { id: "compare", label: "Compare", part: "Two windows", has: (_payload, { windows }) => windows.length > 1, draw: drawCompare };

// State: run, tag and step of the other window; show, filter, sort, down, unfold.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawCompare(_payload, context) {
  const { state, remember, source, listed, window, showWindow } = context;
  const others = listed.windows.filter((each) => !isSameWindow(each, window));
  const node = element("section", { class: "compare", "aria-label": "compare" });
  const choices = element("div", { class: "bar-of-controls", role: "group", "aria-label": "compare with" });
  const body = element("div", { class: "compared" });
  let requests = 0;

  /** @type {(other: ProfileWindow, key: string, value: string) => void} */
  function pick(other, key, value) {
    // The steps of another run are not those of this one: its last window is shown.
    const step = key === "run" ? "" : String(other.step);
    Object.assign(state, { run: other.run, tag: other.tag, step, [key]: value });
    remember();
    fill();
  }

  /** @type {(other: ProfileWindow) => void} */
  function swap(other) {
    Object.assign(state, { run: window.run, tag: window.tag, step: String(window.step) });
    showWindow(other);
  }

  async function fill() {
    const other = (state.run ? nearest(others, state) : windowBefore(listed.windows, others, window)) ?? others[0];
    choices.replaceChildren(
      element("span", {}, "before:"), ...windowChoices(others, other, (key, value) => pick(other, key, value), "compare with "),
      element("button", { type: "button", title: "swap the two windows", onclick: () => swap(other) }, "⇄ swap"),
      element("span", { class: "quiet" }, "after: the window that is chosen at the top of the page"),
    );
    requests += 1;
    const mine = requests;
    body.replaceChildren(element("p", { class: "message" }, "Loading…"));
    try {
      const comparison = await source.compare(other, window);
      if (mine !== requests) return;
      body.replaceChildren(verdict(comparison), figuresOfBoth(comparison), changes(comparison.modules, context));
    } catch (error) {
      if (mine === requests) body.replaceChildren(element("p", { class: "message" }, `These windows cannot be compared: ${messageOf(error)}`));
    }
  }

  fill();
  node.append(choices, body);
  return node;
}

// The last window before a window, of the same run and stage if there is one.
/** @type {(windows: ProfileWindow[], others: ProfileWindow[], window: ProfileWindow) => ProfileWindow | undefined} */
function windowBefore(windows, others, window) {
  const before = windows.slice(0, windows.findIndex((each) => isSameWindow(each, window)));
  return nearest(before.length ? before : others, { run: String(window.run), tag: String(window.tag) });
}

// The verdict on the step; then the changes that explain it, and the circumstances that differ.
/** @type {(comparison: Comparison) => HTMLElement} */
function verdict({ headline, is_news: isNews, step, facts }) {
  /** @type {(values: Value[]) => string} */
  const either = (values) => values.map((value) => value ?? "unknown").join(" → ");
  const caveats = Object.entries(facts).map(([name, values]) => `${words(name)}: ${either(values)}`);
  const [first, ...others] = headline;
  return element(
    "div", { class: "sentences" },
    element("p", { class: `verdict ${step.verdict ?? ""}` }, first),
    isNews ? null : element("p", { class: "no-news" }, "Nothing changed by more than noise."),
    caveats.length ? element("p", { class: "caveat", role: "note" }, `The runs differ in ${caveats.join("; ")}.`) : null,
    element("ul", {}, ...others.map((text) => element("li", {}, text))),
  );
}

/** @type {(sides: [Count, Count]) => Change} */
function changeOf([before, after]) {
  return { before, after };
}

/** @type {[string, string, Format][]} */
const FIGURES = [
  ["mfu", "MFU", ofPeak], ["samples_per_second", "samples/s", perSecond], ["tokens_per_second", "tokens/s", perSecond],
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
      "div", { class: `figure ${change.verdict ?? ""}`, title: `${label}: ${exact(change.before)} before, ${exact(change.after)} after` },
      element("div", { class: "figure-label" }, label),
      element("div", { class: "figure-value" }, text(change.after)),
      bars(change),
      element("div", { class: "remark" }, `was ${text(change.before)}`),
      element("div", { class: "remark" }, change.low ? `${much} (${between({ low: change.low, high: change.high ?? null })})` : much),
    );
  }));
}

// Two bars, before and after, in proportion to the larger value.
/** @type {(change: Change) => HTMLElement} */
export function bars({ before, after }) {
  const most = Math.max(Number(before), Number(after)) || 1;
  /** @type {(side: string, value: Count) => HTMLElement} */
  const bar = (side, value) => element("span", { class: `pair-${side}`, style: { width: `${(100 * Number(value ?? 0)) / most}%` } });
  return element("div", { class: "pair", "aria-hidden": "true" }, bar("before", before), bar("after", after));
}
