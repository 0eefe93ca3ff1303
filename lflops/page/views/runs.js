// The view Runs: a line for each run and stage, with the figures of its last window. One run can be the baseline for the others.

import { element } from "../lib/dom.js";
import { count, duration, ofPeak, perSecond, signed, size } from "../lib/format.js";
import { sortedTable } from "../table/sorted_table.js";
import { brief, isSameWindow, windowStep } from "../lib/windows.js";

/** @type {View} */
export const runs = { id: "runs", label: "All runs", within: "compare", has: (_payload, { windows }) => windows.length > 1, draw: drawRuns };

/** @type {[string, string, Format][]} */
const FIGURES = [
  ["step", "step", duration], ["MFU", "MFU", ofPeak], ["samples/s", "samples/s", perSecond], ["tokens/s", "tokens/s", perSecond],
  ["data", "data wait", duration], ["peak live memory", "peak memory", size],
];

/** @type {Intl.DateTimeFormatOptions} */
const LOGGED = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hour12: false };

/** @typedef {{ window: ProfileWindow, windows: number, key: string, head: Head | null }} RunRow */

// State: filter, sort, down, and baseline, which is the key of a run.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawRuns(_payload, { state, remember, source, listed, window, showWindow, go, follow }) {
  const status = element("span", { class: "quiet", role: "status" });
  /** @type {RunRow[]} */
  let all = [];
  const rows = sortedTable("runs", { size: 0, usual: "wall_time", first: nameCell, state, changed: remember, onenter: (row) => showWindow(all[row].window, "run") });

  const baseline = () => all.find(({ key }) => key === state.baseline);
  /** @type {(row: RunRow, label: string) => number | null} */
  const figure = ({ head }, label) => head?.figures[label] ?? (label === "step" ? head?.figures.pass ?? null : null);

  /** @type {(row: number) => HTMLElement} */
  function nameCell(row) {
    const { window: each, key, windows } = all[row];
    const isPinned = state.baseline === key;
    const [name, stage] = [nameOf(each), each.tag === null ? "" : brief(each.tag)];
    return element(
      "div", { class: "name", role: "rowheader", title: [name, stage].filter(Boolean).join(", ") },
      element("button", {
        type: "button", class: isPinned ? "mark pinned" : "mark", tabindex: -1, "aria-pressed": isPinned,
        "aria-label": `${isPinned ? "unpin" : "pin"} ${name} as the baseline`, title: "all other runs show their difference from the baseline",
        onclick: () => { state.baseline = isPinned ? "" : key; fill(listed.windows); },
      }, isPinned ? "baseline" : "pin"),
      element("button", { type: "button", class: "label to-row", tabindex: -1, onclick: () => showWindow(each, "run") }, name),
      element("span", { class: "kind" }, [stage, windows > 1 ? `${windows} windows` : ""].filter(Boolean).join(", ")),
      isPinned || isSameWindow(each, window) || !window ? null : element("button", {
        type: "button", class: "mark", tabindex: -1, title: "compare this run (before) with the window shown at the top of the page (after)",
        onclick: () => go("compare", { run: each.run, tag: each.tag, step: String(each.step) }),
      }, "compare"),
      isSameWindow(each, window) ? element("span", { class: "mark" }, "shown") : null,
    );
  }

  /** @type {(id: string, label: string, text: Format) => FlatColumn} */
  function figureColumn(id, label, text) {
    /** @type {(value: number | null, row?: number) => string} */
    const written = (value, row) => {
      const base = baseline();
      const reference = base && row !== undefined && all[row] !== base ? figure(base, id) : null;
      return reference && value !== null ? `${text(value)} ${signed(value / reference)}` : text(value);
    };
    return { id, label, text: written, hasBar: true, read: (row) => figure(all[row], id) };
  }

  /** @type {(windows: ProfileWindow[]) => void} */
  function fill(windows) {
    remember();
    all = rowsOf(windows);
    const filter = source.runFilter?.() ?? null;
    const wanted = (state.filter || "").toLowerCase();
    /** @type {(row: RunRow) => string} */
    const words = ({ window: each, head }) => [each.run, each.tag, head?.device, head?.strategy, head?.dtype].join(" ").toLowerCase();
    const shown = all.map((_, row) => row).filter((row) => (!filter || filter.test(nameOf(all[row].window))) && words(all[row]).includes(wanted));
    const hidden = filter ? all.filter(({ window: each }) => !filter.test(nameOf(each))).length : 0;
    status.textContent = [`${shown.length} of ${all.length} runs and stages`, hidden ? `${hidden} hidden by TensorBoard's run filter` : ""].filter(Boolean).join("; ");
    /** @type {(id: string, label: string, read: (row: RunRow) => any, text?: Format) => FlatColumn} */
    const column = (id, label, read, text) => ({ id, label, text, read: (row) => read(all[row]) });
    const columns = [
      column("run", "run", ({ window: each }) => nameOf(each)),
      column("at", "at step", ({ window: each }) => Number(windowStep(each, windows)), String),
      ...FIGURES.map(([id, label, text]) => figureColumn(id, label, text)),
      column("device", "device", ({ head }) => head?.device ?? null), column("strategy", "strategy", ({ head }) => head?.strategy ?? null),
      column("ranks", "ranks", ({ head }) => head?.ranks ?? null, count), column("dtype", "precision", ({ head }) => head?.dtype ?? null),
      column("wall_time", "logged at", ({ window: each }) => each.wall_time ?? null, (time) => (time === null ? "–" : new Date(1000 * time).toLocaleString([], LOGGED))),
    ];
    /** @type {(column: FlatColumn) => boolean} */
    const isKnown = ({ id, read }) => ["run"].includes(id) || shown.some((row) => read(row) !== null && read(row) !== "" && !Number.isNaN(read(row)));
    rows.node.classList.toggle("with-differences", baseline() !== undefined);
    rows.show(shown, columns.filter(isKnown), all.length);
  }

  const field = element("input", {
    type: "search", placeholder: "run, device, strategy", "aria-label": "filter runs", value: state.filter || "",
    oninput: () => { state.filter = field.value; fill(listed.windows); },
  });
  follow(fill);
  fill(listed.windows);
  return element("section", { class: "runs", "aria-label": "runs" }, element("div", { class: "bar-of-controls" }, field, status), rows.node);
}

/** @type {(window: ProfileWindow) => string} */
function nameOf({ run }) {
  return run ?? "this file";
}

// The last window of each run and stage.
/** @type {(windows: ProfileWindow[]) => RunRow[]} */
function rowsOf(windows) {
  /** @type {Map<string, RunRow>} */
  const found = new Map();
  for (const window of windows) {
    const key = JSON.stringify([window.run, window.tag]);
    const before = found.get(key);
    const isLater = !before || Number(window.step) >= Number(before.window.step);
    found.set(key, { window: isLater ? window : before.window, windows: (before?.windows ?? 0) + 1, key, head: (isLater ? window : before.window).head ?? null });
  }
  return [...found.values()];
}
