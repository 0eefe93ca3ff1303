// The view Ranks: which ranks reported, where ranks are slow, and the figures of each rank.

import { element, select } from "../lib/dom.js";
import { count, duration, exact, size } from "../lib/format.js";
import { Grid } from "../table/virtual_table.js";
import { rankHeatmap } from "../charts/rank_heatmap.js";
import { byName, order } from "../table/module_rows.js";

/** @type {View} */
export const ranks = { id: "ranks", label: "Ranks", has: ({ ranks: data }) => data !== null, draw: drawRanks, ofOneRank: true };

/** @type {Record<string, string[]>} */
const STATUSES = {
  ok: ["reported", "its report arrived"],
  late: ["late", "it did not finish sending its report in time"],
  missing: ["missing", "no report arrived"],
  failed: ["failed", "it ended with an exception"],
};
const OLDER = "The times of the ranks are unknown, because an earlier version of lflops wrote this profile. Profile the run again.";
const UNTIMED = "The ranks cannot be compared, because no module was timed on two ranks. "
  + "FlopsMonitor times modules in the steps after the active steps, and lflops.measure times modules in separate passes.";
const COMPARED = "A row is a phase of a module, or a phase outside all modules. A cell shows the self time of a rank (the median over the steps), compared with the "
  + "median rank. Only the rows with the largest differences are shown. A hatched cell means that the rank reported no time.";
const HIGHEST = 460;

/** @type {Format} */
const orDash = (value) => value ?? "–";
/** @type {{ id: string, label: string, text: Format, title?: Format }[]} */
const COLUMNS_OF_RANKS = [
  { id: "rank", label: "rank", text: String },
  { id: "status", label: "status", text: (status) => STATUSES[status][0], title: (status) => STATUSES[status].join(": ") },
  { id: "place", label: "position", text: orDash },
  { id: "host", label: "host", text: orDash },
  { id: "device", label: "device", text: orDash },
  { id: "step", label: "step", text: duration },
  { id: "data", label: "data wait", text: duration },
  { id: "cpu", label: "CPU time", text: duration },
  { id: "macs", label: "MACs", text: count },
  { id: "peak_bytes", label: "peak memory", text: size },
  { id: "slowest", label: "steps finished last", text: count },
];
const WORDED = new Set(["rank", "status", "place", "host", "device"]);

// State: order of the columns; sort and down of the table.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawRanks(payload, context) {
  const data = /** @type {Ranks} */ (payload.ranks);
  return element(
    "section", { class: "ranks", "aria-label": "ranks" },
    reportLines(data.said),
    element("h2", {}, "Where ranks are slow"),
    ...slowWhere(data, context),
    element("h2", {}, "All ranks"),
    everyRank(data, context),
  );
}

/** @type {(said: [string, string][]) => HTMLElement} */
function reportLines(said) {
  return element("dl", { class: "facts" }, ...said.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
}

/** @type {(data: Ranks, context: Context) => HTMLElement[]} */
function slowWhere(data, context) {
  if (!data.seconds.length) {
    return [element("p", { class: "remark" }, data.compared ? OLDER : UNTIMED)];
  }
  const { state, remember, go } = context;
  const container = element("div", {});
  /** @type {(module: string) => void} */
  const openModule = (module) => go("modules", { row: module, filter: "", flat: "" });
  function draw() {
    const byNumber = state.order === "number";
    const ordered = byNumber ? data.ranks.rank : data.slowest_first;
    container.replaceChildren(rankHeatmap({ ...data, sortedBySlowness: !byNumber }, ordered, { ...context, openModule }));
  }
  const choice = select("order of ranks", [["", "slowest first"], ["number", "by number"]], state.order ?? "", (value) => {
    state.order = value;
    remember();
    draw();
  });
  draw();
  return [element("p", { class: "remark" }, COMPARED), choice, container];
}

/** @type {(data: Ranks, context: Context) => HTMLElement} */
function everyRank(data, { state, remember, rank }) {
  const columns = data.ranks;
  const grid = new Grid("all ranks");
  const all = columns.rank.map((_, row) => row);
  const rowOf = new Map(columns.rank.map((each, row) => [each, row]));

  /** @type {() => number[]} */
  function sorted() {
    const { sort } = state;
    if (!sort) return data.slowest_first.map((each) => rowOf.get(each) ?? 0);
    if (!WORDED.has(sort)) return [...all].sort(order((row) => columns[sort][row], Boolean(state.down), all.length) ?? undefined);
    return [...all].sort(byName(columns[sort].map((value) => String(value ?? "")), Boolean(state.down)) ?? undefined);
  }

  function draw() {
    grid.show({
      columns: COLUMNS_OF_RANKS.map(({ id, label }) => ({
        label, sort: state.sort !== id ? "none" : state.down ? "descending" : "ascending",
        onsort: () => {
          const down = state.sort === id ? !state.down : !WORDED.has(id);
          Object.assign(state, { sort: id, down: down ? "true" : "" });
          remember();
          draw();
        },
      })),
      rows: sorted(), level: () => 1, isOpen: () => null, toggle: () => {},
      cells: (row) => COLUMNS_OF_RANKS.map(({ id, label, text, title }) => {
        const value = columns[id][row];
        const kind = [WORDED.has(id) ? "text" : "number", columns.rank[row] === rank ? "of-rank" : "", id === "status" && value !== "ok" ? "caveat" : ""];
        const shown = title ? title(value) : `${label}: ${exact(value)}`;
        return element("div", { role: "gridcell", class: kind.join(" "), title: shown }, element("span", { class: "digits" }, text(value)));
      }),
    });
  }

  grid.node.style.height = `${Math.min(all.length * 26 + 44, HIGHEST)}px`;
  draw();
  return grid.node;
}
