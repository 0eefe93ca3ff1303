// The ranks of a run: who answered, who is slow where, and what each of them took.

import { element, select } from "../lib/dom.js";
import { count, duration, exact, size } from "../lib/format.js";
import { Grid } from "../table/virtual_table.js";
import { heat } from "../charts/rank_heatmap.js";
import { byName, order } from "../table/module_rows.js";

export const ranks = { id: "ranks", label: "Ranks", draw: drawRanks, ofOneRank: true };

const STATUSES = {
  ok: ["answered", "it told all that it had"],
  late: ["late", "it had begun to tell, and was not done in time"],
  missing: ["missing", "nothing came of it"],
  failed: ["failed", "it was left by an exception"],
};
const ALONE_HERE = "There is one rank here. FlopsMonitor compares those of a distributed training by itself; "
  + "of profiles that each rank saved, lflops.merge makes one.";
const OLDER = "Unknown: this profile keeps no rank's own times. It was written by an earlier lflops: profile again.";
const UNTIMED = "Unknown: no module's time is known of two ranks. "
  + "FlopsMonitor takes them in the steps behind the active ones, lflops.measure with its other passes.";
const COMPARED = "A module's own time in a phase, the median over the steps; what of it is known to be waiting for other ranks is left out. "
  + "Shown are the places that cost a step the most, hatched where a rank told no time.";
const HIGHEST = 460;

const orDash = (value) => value ?? "–";
const COLUMNS_OF_RANKS = [
  { id: "rank", label: "rank", text: String },
  { id: "status", label: "status", text: (status) => STATUSES[status][0], said: (status) => STATUSES[status].join(": ") },
  { id: "place", label: "place", text: orDash },
  { id: "host", label: "host", text: orDash },
  { id: "device", label: "device", text: orDash },
  { id: "step", label: "step", text: duration },
  { id: "data", label: "data wait", text: duration },
  { id: "cpu", label: "CPU time", text: duration },
  { id: "macs", label: "MACs", text: count },
  { id: "peak_bytes", label: "peak memory", text: size },
  { id: "slowest", label: "steps slowest", text: count },
];
const WORDED = new Set(["rank", "status", "place", "host", "device"]);

// Its state: order of the columns, and sort and down of the table.
function drawRanks(payload, context) {
  const found = payload.ranks;
  if (!found) {
    return element(
      "section", { class: "ranks", "aria-label": "ranks" },
      element("p", { class: "message" }, ALONE_HERE),
    );
  }
  return element(
    "section", { class: "ranks", "aria-label": "ranks" },
    lines(found.said),
    element("h2", {}, "Who is slow where"),
    ...slowWhere(found, context),
    element("h2", {}, "Every rank"),
    everyRank(found, context),
  );
}

function lines(said) {
  return element("dl", { class: "facts" }, ...said.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
}

function slowWhere(found, context) {
  if (!found.seconds.length) {
    return [element("p", { class: "remark" }, found.compared ? OLDER : UNTIMED)];
  }
  const { state, remember, go } = context;
  const place = element("div", {});
  const lead = (module) => go("modules", { row: module, filter: "", flat: "" });
  function draw() {
    const byNumber = state.order === "number";
    const ordered = byNumber ? found.ranks.rank : found.slowest_first;
    place.replaceChildren(heat({ ...found, sortedBySlowness: !byNumber }, ordered, { ...context, lead }));
  }
  const choice = select("order of ranks", [["", "slowest first"], ["number", "by number"]], state.order ?? "", (value) => {
    state.order = value;
    remember();
    draw();
  });
  draw();
  return [element("p", { class: "remark" }, COMPARED), choice, place];
}

function everyRank(found, { state, remember, rank }) {
  const columns = found.ranks;
  const grid = new Grid("every rank");
  const all = columns.rank.map((_, row) => row);
  const rowOf = new Map(columns.rank.map((each, row) => [each, row]));

  function sorted() {
    const { sort } = state;
    if (!sort) return found.slowest_first.map((each) => rowOf.get(each));
    if (!WORDED.has(sort)) return [...all].sort(order((row) => columns[sort][row], Boolean(state.down), all.length));
    return [...all].sort(byName(columns[sort].map((value) => String(value ?? "")), Boolean(state.down)));
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
      cells: (row) => COLUMNS_OF_RANKS.map(({ id, label, text, said }) => {
        const value = columns[id][row];
        const kind = [WORDED.has(id) ? "text" : "number", columns.rank[row] === rank ? "of-rank" : "", id === "status" && value !== "ok" ? "doubt" : ""];
        const title = said ? said(value) : `${label}: ${exact(value)}`;
        return element("div", { role: "gridcell", class: kind.join(" "), title }, element("span", { class: "digits" }, text(value)));
      }),
    });
  }

  grid.node.style.height = `${Math.min(all.length * 26 + 44, HIGHEST)}px`;
  draw();
  return grid.node;
}
