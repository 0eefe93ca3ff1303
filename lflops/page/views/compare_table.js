// The table of Compare: the modules of two windows. Slower and faster modules come first, by the seconds that they cost, then modules with other
// work, then added and removed modules. A row opens into its phases and figures.

import { reader } from "../table/module_columns.js";
import { element, select } from "../lib/dom.js";
import { between, count, duration, exact, signed, size } from "../lib/format.js";
import { spelledOut } from "../lib/module_link.js";
import { Grid } from "../table/virtual_table.js";
import { lastOf, order } from "../table/module_rows.js";

/**
 * A row of the table: a module; several modules of one pattern with the same kind of change; or, with `above`, a part of a module. `isOwn` means
 * that the time is self time. `members` are the modules that the row stands for, and `at` is the first of them.
 * @typedef {Change & {
 *   at: number, rank: number, weight: number, isRenamed: boolean, isOwn: boolean, names: string, above?: undefined, members: ModuleRow[],
 *   level: number, pattern: string, values: Record<string, any>,
 * }} ModuleRow
 * @typedef {{ above: ModuleRow, label: string, text: Format, level: number, values: Record<string, any> }} PartRow
 */

const KINDS_OF_CHANGE = ["slower", "faster", "work changed", "added", "removed", "renamed"];
const UNCHANGED = 4; // the rank of a module without a change
const PHASES = ["forward", "backward", "recompute"]; // phases whose times are compared

/** @type {Format} */
const plain = (text) => text ?? "";
/** @type {{ id: string, label: string, text: Format, exact: Format }[]} */
const CHANGE_COLUMNS = [
  { id: "kind", label: "what changed", text: (kind) => kind ?? "–", exact: plain },
  { id: "before", label: "time before", text: duration, exact },
  { id: "after", label: "time after", text: duration, exact },
  { id: "pair", label: "before and after", text: plain, exact: plain },
  { id: "ratio", label: "change", text: signed, exact: signed },
  { id: "interval", label: "interval", text: plain, exact: plain },
  { id: "lost", label: "cost per step", text: (lost) => (lost === null ? "" : duration(lost)), exact },
  { id: "macs_before", label: "MACs before", text: count, exact },
  { id: "macs_after", label: "MACs after", text: count, exact },
];
/** @type {{ id: string, label: string }[]} */
const EXPORTED = CHANGE_COLUMNS.filter(({ id }) => id !== "pair").flatMap((column) => (
  column.id === "interval" ? [{ id: "low", label: "change, at least" }, { id: "high", label: "change, at most" }] : [column]
));
const SORTABLE_CHANGES = ["before", "after", "ratio", "lost", "macs_before", "macs_after"];

/** @type {(time: { verdict?: string | null }) => boolean} */
export function isChanged({ verdict }) {
  return verdict === "slower" || verdict === "faster";
}

/** @type {(change: Change) => number | null} */
export function ratioOf({ before, after }) {
  return after === null || before === null || Number(before) === 0 ? null : Number(after) / Number(before);
}

/** @type {(change: Change) => boolean} */
export function differs({ before, after }) {
  return before !== null && after !== null && before !== after;
}

// `table` has the modules of a comparison, column by column.
/** @type {(table: Columns, context: Pick<Context, "state" | "remember">) => HTMLElement} */
export function changes(table, { state, remember }) {
  const kinds = reader(table, "kind");
  const single = rowsOf(table);
  const folded = foldedRows(single);
  /** @type {(rows: ModuleRow[]) => ModuleRow[]} */
  const byImportance = (rows) => [...rows].sort((a, b) => a.rank - b.rank || b.weight - a.weight || a.at - b.at);
  const ordered = { folded: byImportance(folded), single: byImportance(single) };
  const listed = () => (state.unfold ? ordered.single : ordered.folded);
  const most = folded.reduce((largest, { values }) => Math.max(largest, Math.abs(values.lost ?? 0)), 0);
  const longest = folded.reduce((largest, { rank, values }) => (rank < UNCHANGED ? Math.max(largest, values.before ?? 0, values.after ?? 0) : largest), 0);
  /** @type {Set<ModuleRow>} */
  const open = new Set();
  const grid = new Grid("modules that changed");
  const status = element("span", { class: "quiet", role: "status" });
  const nothing = element("p", { class: "message" }, "No module is listed, because no module changed by more than noise, or no module matches the filter.");

  /** @type {(id: string) => void} */
  function sortBy(id) {
    if (state.sort !== id) Object.assign(state, { sort: id, down: true });
    else Object.assign(state, state.down ? { down: false } : { sort: "", down: false });
    draw();
  }

  /** @type {(list: ModuleRow[]) => ModuleRow[]} */
  function sorted(list) {
    if (!SORTABLE_CHANGES.includes(state.sort)) return list;
    const compare = order((at) => list[at].values[state.sort], Boolean(state.down), list.length);
    return compare === null ? list : list.map((_, at) => at).sort(compare).map((at) => list[at]);
  }

  /** @type {(row: ModuleRow) => void} */
  function toggle(row) {
    if (!open.delete(row)) open.add(row);
    draw();
  }

  /** @type {(row: ModuleRow) => (ModuleRow | PartRow)[]} */
  function withWhatIsOpen(row) {
    if (!open.has(row)) return [row];
    return [row, ...(row.members.length > 1 ? row.members.flatMap(withWhatIsOpen) : partsOf(row, table))];
  }

  function draw() {
    remember();
    const wanted = (state.filter || "").toLowerCase();
    /** @type {(row: ModuleRow) => boolean} */
    const matches = ({ names, at }) => names.toLowerCase().includes(wanted) || kinds(at).toLowerCase().includes(wanted);
    const chosen = sorted(listed().filter((row) => isShown(row, state.show) && matches(row)));
    const many = chosen.reduce((sum, { members }) => sum + members.length, 0);
    status.textContent = `${many || "none"} of ${single.length} modules`;
    nothing.hidden = chosen.length > 0;
    grid.node.hidden = !chosen.length;
    grid.show({
      columns: [{ id: "name", label: "module" }, ...CHANGE_COLUMNS].map(({ id, label }) => ({
        label, onsort: () => sortBy(id), sort: state.sort !== id ? "none" : state.down ? "descending" : "ascending",
      })),
      rows: chosen.flatMap(withWhatIsOpen),
      level: (row) => row.level,
      isOpen: (row) => (row.above ? null : open.has(row)),
      toggle,
      cells: (row) => [
        row.above ? partCell(row) : changedCell(row, kinds(row.at), open.has(row), toggle), ...CHANGE_COLUMNS.map((column) => figureCell(column, row, { most, longest })),
      ],
      exported: {
        labels: ["module before", "module after", "class", "modules", "part", ...EXPORTED.map(({ label }) => label)],
        values: (row) => {
          const { at, before, after, members, pattern } = row.above ?? row;
          const names = members.length > 1 ? [before === null ? null : pattern, after === null ? null : pattern] : [before, after];
          const shown = names.map((name) => (name === "" ? "(model)" : name));
          return [...shown, kinds(at), members.length, row.label ?? null, ...EXPORTED.map(({ id }) => row.values[id] ?? null)];
        },
      },
    });
  }

  /** @type {(kind: string) => number} */
  const many = (kind) => single.filter((row) => isShown(row, kind)).length;
  /** @type {string[][]} */
  const options = [
    ["", `what changed (${many("")})`],
    ...KINDS_OF_CHANGE.filter((kind) => many(kind)).map((kind) => [kind, `${kind} (${many(kind)})`]),
    ["all", `all (${single.length})`],
  ];
  if (!options.some(([kind]) => kind === state.show)) state.show = "";
  const field = element("input", {
    type: "search", placeholder: "name or class", "aria-label": "filter by name or class", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const choice = select("show", options, state.show, (kind) => { state.show = kind; draw(); });
  const fold = element("input", { type: "checkbox", checked: !state.unfold, onchange: () => { state.unfold = fold.checked ? "" : "true"; draw(); } });
  draw();
  return element(
    "div", { class: "changes" },
    element("div", { class: "bar-of-controls" }, choice, field, element("label", { class: "choice" }, fold, "fold identical modules"), status), nothing, grid.node,
  );
}

/** @type {(row: ModuleRow, show: string | undefined) => boolean} */
function isShown(row, show) {
  if (show === "all") return true;
  return show === "renamed" ? row.isRenamed : show ? row.values.kind === show : row.rank < UNCHANGED;
}

// Fold the rows of one pattern and one kind of change into a row with their sums.
/** @type {(rows: ModuleRow[]) => ModuleRow[]} */
function foldedRows(rows) {
  /** @type {Map<string, ModuleRow[]>} */
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.pattern, row.values.kind, row.isRenamed, row.isOwn]);
    const group = groups.get(key);
    if (group) group.push(row);
    else groups.set(key, [row]);
  }
  /** @type {Map<string, number>} */
  const sizes = new Map();
  for (const { pattern } of rows) sizes.set(pattern, (sizes.get(pattern) ?? 0) + 1);
  return [...groups.values()].map((members) => {
    const [first] = members;
    if (members.length === 1) return first;
    const pattern = sizes.get(first.pattern) === members.length ? first.pattern : spelledOut(members.map(({ before, after }) => String(after ?? before)));
    /** @type {(id: string) => number | null} */
    const sum = (id) => members.reduce((/** @type {number | null} */ all, { values }) => (all === null || values[id] === null ? null : all + Number(values[id])), 0);
    const totals = Object.fromEntries(["before", "after", "lost", "macs_before", "macs_after"].map((id) => [id, sum(id)]));
    const [low, high] = [members.map(({ values }) => values.low), members.map(({ values }) => values.high)];
    const bounds = low.includes(null) ? null : between({ low: Math.min(...low), high: Math.max(...high) });
    return {
      ...first, members: members.map((each) => ({ ...each, level: 2 })), weight: members.reduce((all, { weight }) => all + weight, 0),
      pattern, names: `${pattern} ×${members.length}`,
      values: { ...first.values, ...totals, ratio: ratioOf({ before: totals.before, after: totals.after }), interval: bounds },
    };
  });
}

// A row for each module: its names, whether its self time is shown, what changed, and how much that matters.
/** @type {(table: Columns) => ModuleRow[]} */
function rowsOf(table) {
  const [before, after, isOwn, pattern] = ["before", "after", "own", "pattern"].map((name) => reader(table, name));
  const time = Object.fromEntries(["before", "after", "ratio", "low", "high", "lost", "verdict"].map((name) => [name, reader(table, `time.${name}`)]));
  const work = ["macs", "flops", "bytes_moved", "parameters"].map((name) => changeReader(table, name));
  return Array.from({ length: rowsIn(table) }, (_, at) => {
    const names = { before: before(at), after: after(at) };
    const isRenamed = Boolean(names.before) && Boolean(names.after) && lastOf(names.before) !== lastOf(names.after);
    const [macs, ...others] = work.map((read) => read(at));
    /** @type {Record<string, any>} */
    const shown = Object.fromEntries(Object.entries(time).map(([name, read]) => [name, read(at)]));
    const [kind, rank, weight] = whatChanged(names, shown, [macs, ...others], isRenamed);
    /** @type {ModuleRow} */
    const row = {
      ...names, at, rank, weight, isRenamed, isOwn: isOwn(at), members: [], level: 1, pattern: pattern(at),
      names: (isRenamed ? [names.before, names.after] : [names.after ?? names.before]).map((name) => name || "(model)").join(" → "),
      values: {
        kind, before: shown.before, after: shown.after, ratio: shown.ratio,
        interval: shown.low === null ? null : between({ low: shown.low, high: shown.high }),
        low: shown.low, high: shown.high, lost: shown.lost, macs_before: macs.before, macs_after: macs.after,
      },
    };
    row.members = [row];
    return row;
  });
}

// A column with a single value has that value in all rows.
/** @type {(table: Columns) => number} */
function rowsIn(table) {
  const column = Object.values(table).find(Array.isArray);
  return Array.isArray(column) ? column.length : 1;
}

/** @type {(table: Columns, name: string) => Reader<Change>} */
function changeReader(table, name) {
  const [before, after] = ["before", "after"].map((side) => reader(table, `${name}.${side}`));
  return (at) => ({ before: before(at), after: after(at) });
}

// The kind of change, its rank, and the order within the rank.
/** @type {(names: Change, time: Record<string, any>, work: Change[], isRenamed: boolean) => [string | null, number, number]} */
function whatChanged({ before, after }, time, work, isRenamed) {
  const [macs] = work;
  if (before === null || after === null) return [before === null ? "added" : "removed", 2, 0];
  if (isChanged(time)) return [time.verdict, 0, Math.abs(Number(time.lost))];
  if (work.some(differs)) {
    const costs = time.lost !== null && time.verdict === null;
    return ["work changed", costs ? 0 : 1, costs ? Math.abs(Number(time.lost)) : differs(macs) ? Math.abs(Number(macs.after) - Number(macs.before)) : 0];
  }
  return isRenamed ? ["renamed", 3, 0] : [time.verdict, UNCHANGED, 0];
}

/** @type {[string, string, Format][]} */
const FIGURES_OF_MODULE = [
  ["flops", "self FLOPs", count], ["bytes_moved", "self bytes moved", size], ["parameters", "self parameters", count], ["peak_bytes", "peak memory", size],
];

// The rows that a row opens into: its phases, and its figures that differ.
/** @type {(row: ModuleRow, table: Columns) => PartRow[]} */
function partsOf(row, table) {
  /** @type {(name: string) => Change} */
  const read = (name) => changeReader(table, name)(row.at);
  /** @type {(label: string, change: Change, text: Format, more?: Record<string, any>) => PartRow} */
  const part = (label, change, text, more = {}) => (
    { above: row, label, text, level: row.level + 1, values: { before: change.before, after: change.after, ratio: ratioOf(change), ...more } }
  );
  /** @type {(change: Change) => boolean} */
  const hasAny = (change) => Boolean(Number(change.before) || Number(change.after));
  const phases = PHASES
    .map((phase) => ({ phase, seconds: read(`${phase}.seconds`), macs: read(`${phase}.macs`) }))
    .filter(({ seconds, macs }) => hasAny(seconds) || hasAny(macs));
  const perMac = reader(table, "time.per_mac")(row.at);
  const figures = FIGURES_OF_MODULE.map(([name, label, text]) => ({ label, change: read(name), text })).filter(({ change }) => differs(change));
  return [
    ...phases.map(({ phase, seconds, macs }) => part(phase, seconds, duration, { macs_before: macs.before, macs_after: macs.after })),
    ...(perMac === null ? [] : [{ above: row, label: "time per MAC", text: () => "", level: row.level + 1, values: { ratio: perMac } }]),
    ...figures.map(({ label, change, text }) => part(label, change, text)),
  ];
}

// The time before above the time after, as bars.
/** @type {(row: ModuleRow | PartRow, longest: number) => HTMLElement} */
function pairCell(row, longest) {
  const { before, after } = row.values;
  if (row.above || !longest || (before === null && after === null)) return element("div", { role: "gridcell", class: "number" });
  /** @type {(side: string, value: number | null) => HTMLElement} */
  const bar = (side, value) => element("span", { class: `pair-${side}`, style: { width: `${Math.min((100 * Number(value ?? 0)) / longest, 100)}%` } });
  return element(
    "div", { role: "gridcell", class: "number", title: `${duration(before)} before, ${duration(after)} after` },
    element("div", { class: "pair" }, bar("before", before), bar("after", after)),
  );
}

/** @type {(row: PartRow) => HTMLElement} */
function partCell({ label }) {
  return element("div", { class: "name part", role: "gridcell" }, label);
}

/** @type {(row: ModuleRow, kind: string, isOpen: boolean, toggle: (row: ModuleRow) => void) => HTMLElement} */
function changedCell(row, kind, isOpen, toggle) {
  const title = "the times in this row are the times of the module without its submodules";
  return element(
    "div", { class: row.level > 1 ? "name part" : "name", role: "gridcell", title: row.names },
    element("button", {
      class: "toggle", type: "button", tabindex: -1, "aria-label": `${isOpen ? "close" : "open"} ${row.names}`, onclick: () => toggle(row),
    }, isOpen ? "▾" : "▸"),
    element("span", { class: "label" }, row.names), element("span", { class: "kind" }, kind),
    row.isOwn ? element("span", { class: "mark", title }, "self time") : null,
  );
}

/** @type {(column: typeof CHANGE_COLUMNS[number], row: ModuleRow | PartRow, scale: { most: number, longest: number }) => HTMLElement} */
function figureCell({ id, label, text, exact: title }, row, { most, longest }) {
  if (id === "pair") return pairCell(row, longest);
  const value = row.values[id] ?? null;
  const isPart = row.above !== undefined;
  const show = isPart && (id === "before" || id === "after") ? row.text : text;
  const look = id === "kind" ? `change-${plain(value).replace(" ", "-")}` : value ? "" : "nothing";
  const bar = id === "lost" && value && most
    ? element("span", { class: `bar ${value > 0 ? "slower" : "faster"}`, style: { width: `${(100 * Math.abs(value)) / most}%` } })
    : null;
  return element(
    "div", { class: `number ${look}`, role: "gridcell", title: `${label}: ${title(value)}` }, bar,
    element("span", { class: "digits" }, isPart && value === null ? "" : show(value)),
  );
}
