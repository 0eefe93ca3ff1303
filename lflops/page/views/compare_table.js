// The modules of two windows, what changed first: what is slower or faster by the seconds that it costs, then other work, then what came
// and went. A row opens into its phases and its figures.

import { byPhase, differs, newsOf, ratioOf, workDiffers } from "../compare/differences.js";
import { element, select } from "../lib/dom.js";
import { between, count, duration, exact, signed, size } from "../lib/format.js";
import { Grid } from "../table/virtual_table.js";
import { isNews } from "../compare/judging.js";
import { lastOf, order } from "../table/module_rows.js";

const KINDS_OF_CHANGE = ["slower", "faster", "work changed", "added", "removed", "renamed"];
const UNCHANGED = 4; // the rank of what nothing happened to

const plainly = (text) => text ?? "";
const CHANGE_COLUMNS = [
  { id: "kind", label: "what changed", text: (kind) => kind ?? "–", said: plainly },
  { id: "before", label: "time before", text: duration, said: exact },
  { id: "after", label: "time after", text: duration, said: exact },
  { id: "ratio", label: "change", text: signed, said: signed },
  { id: "interval", label: "beyond the run, between", text: plainly, said: plainly },
  { id: "lost", label: "lost a step", text: (lost) => (lost === null ? "" : duration(lost)), said: exact },
  { id: "macs_before", label: "own MACs before", text: count, said: exact },
  { id: "macs_after", label: "own MACs after", text: count, said: exact },
];
const SORTABLE_CHANGES = ["before", "after", "ratio", "lost", "macs_before", "macs_after"];

export function changes(found, before, after, { state, remember }) {
  const rows = found.modules.map(rowOf);
  const first = [...rows].sort((a, b) => a.rank - b.rank || b.weight - a.weight || a.at - b.at);
  const most = Math.max(...rows.map(({ values }) => Math.abs(values.lost ?? 0)));
  const open = new Set();
  const grid = new Grid("modules that changed");
  const said = element("span", { class: "said", role: "status" });

  function sortBy(id) {
    if (state.sort !== id) Object.assign(state, { sort: id, down: true });
    else Object.assign(state, state.down ? { down: false } : { sort: "", down: false });
    draw();
  }

  function sorted(list) {
    if (!SORTABLE_CHANGES.includes(state.sort)) return list;
    const compare = order((at) => rows[at].values[state.sort], Boolean(state.down), rows.length);
    return [...list].sort((a, b) => compare(a.at, b.at));
  }

  function toggle(row) {
    if (!open.delete(row)) open.add(row);
    draw();
  }

  function draw() {
    remember();
    const wanted = (state.filter || "").toLowerCase();
    const matches = ({ names, module }) => names.toLowerCase().includes(wanted) || module.kind.toLowerCase().includes(wanted);
    const chosen = sorted(first.filter((row) => isShown(row, state.show) && matches(row)));
    said.textContent = `${chosen.length || "none"} of ${rows.length} modules`;
    grid.show({
      columns: [{ id: "name", label: "module" }, ...CHANGE_COLUMNS].map(({ id, label }) => ({
        label, onsort: () => sortBy(id), sort: state.sort !== id ? "none" : state.down ? "descending" : "ascending",
      })),
      rows: chosen.flatMap((row) => (open.has(row) ? [row, ...partsOf(row, before, after)] : [row])),
      level: (row) => (row.above ? 2 : 1),
      isOpen: (row) => (row.above ? null : open.has(row)),
      toggle,
      cells: (row) => [
        row.above ? partCell(row) : changedCell(row, open.has(row), toggle), ...CHANGE_COLUMNS.map((column) => figureCell(column, row, most)),
      ],
      exported: {
        labels: ["module before", "module after", "class", "part", ...CHANGE_COLUMNS.map(({ label }) => label)],
        values: (row) => {
          const { before: one, after: other, kind } = (row.above ?? row).module;
          const names = [one, other].map((name) => (name === "" ? "(root)" : name));
          return [...names, kind, row.label ?? null, ...CHANGE_COLUMNS.map(({ id }) => row.values[id] ?? null)];
        },
      },
    });
  }

  const many = (kind) => rows.filter((row) => isShown(row, kind)).length;
  const options = [
    ["", `what changed (${many("")})`],
    ...KINDS_OF_CHANGE.filter(many).map((kind) => [kind, `${kind} (${many(kind)})`]),
    ["all", `all (${rows.length})`],
  ];
  if (!options.some(([kind]) => kind === state.show)) state.show = "";
  const field = element("input", {
    type: "search", placeholder: "name or class", "aria-label": "filter by name or class", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const choice = select("show", options, state.show, (kind) => { state.show = kind; draw(); });
  draw();
  return element("div", { class: "changes" }, element("div", { class: "bar-of-controls" }, choice, field, said), grid.node);
}

function isShown(row, show) {
  if (show === "all") return true;
  return show === "renamed" ? row.isRenamed : show ? row.values.kind === show : row.rank < UNCHANGED;
}

// What there is to say of a module, and how much it matters.
function rowOf(module, at) {
  const { before, after, own: { macs } } = module;
  const time = newsOf(module);
  const isRenamed = Boolean(before) && Boolean(after) && lastOf(before) !== lastOf(after);
  const [kind, rank, weight] = whatChanged(module, time, isRenamed);
  return {
    at, module, rank, weight, isRenamed,
    names: (isRenamed ? [before, after] : [after ?? before]).map((name) => name || "(root)").join(" → "),
    values: {
      kind, before: time.before, after: time.after, ratio: time.ratio, interval: time.low === null ? null : between(time), lost: time.lost,
      macs_before: macs.before, macs_after: macs.after,
    },
  };
}

// In a word, how high up it belongs, and its place there.
function whatChanged({ before, after, own }, time, isRenamed) {
  if (before === null || after === null) return [before === null ? "added" : "removed", 2, 0];
  if (isNews(time)) return [time.verdict, 0, Math.abs(time.lost)];
  if (workDiffers(own)) return ["work changed", 1, differs(own.macs) ? Math.abs(Number(own.macs.after) - Number(own.macs.before)) : 0];
  return isRenamed ? ["renamed", 3, 0] : [time.verdict, UNCHANGED, 0];
}

// What a row opens into: its phases, and what of its own figures differs.
function partsOf(row, before, after) {
  const { own, peak_bytes: peak } = row.module;
  const time = newsOf(row.module);
  const part = (label, change, text, more = {}) => (
    { above: row, label, text, values: { before: change.before, after: change.after, ratio: ratioOf(change), ...more } }
  );
  const hasAny = (change) => Number(change.before) || Number(change.after);
  const phases = byPhase(before, after, row.module, isNews(own.time)).filter(({ seconds, macs }) => hasAny(seconds) || hasAny(macs));
  const figures = [
    ["own FLOPs", own.flops, count], ["own bytes moved", own.bytes_moved, size], ["own parameters", own.parameters, count],
    ["peak memory", peak, size],
  ];
  return [
    ...phases.map(({ phase, seconds, macs }) => part(phase, seconds, duration, { macs_before: macs.before, macs_after: macs.after })),
    ...(time.per_mac === null ? [] : [{ above: row, label: "time a MAC", text: () => "", values: { ratio: time.per_mac } }]),
    ...figures.filter(([, change]) => differs(change)).map(([label, change, text]) => part(label, change, text)),
  ];
}

function partCell({ label }) {
  return element("div", { class: "name part", role: "gridcell" }, label);
}

function changedCell(row, isOpen, toggle) {
  const title = "the time of the module itself, without what is below it";
  return element(
    "div", { class: "name", role: "gridcell", title: row.names },
    element("button", {
      class: "toggle", type: "button", tabindex: -1, "aria-label": `${isOpen ? "close" : "open"} ${row.names}`, onclick: () => toggle(row),
    }, isOpen ? "▾" : "▸"),
    element("span", { class: "label" }, row.names), element("span", { class: "kind" }, row.module.kind),
    isNews(row.module.own.time) ? element("span", { class: "mark", title }, "own time") : null,
  );
}

function figureCell({ id, label, text, said }, row, most) {
  const value = row.values[id] ?? null;
  const isPart = row.above !== undefined;
  const show = isPart && (id === "before" || id === "after") ? row.text : text;
  const look = id === "kind" ? `told-${plainly(value).replace(" ", "-")}` : value ? "" : "nothing";
  const bar = id === "lost" && value && most
    ? element("span", { class: `bar ${value > 0 ? "slower" : "faster"}`, style: { width: `${(100 * Math.abs(value)) / most}%` } })
    : null;
  return element(
    "div", { class: `number ${look}`, role: "gridcell", title: `${label}: ${said(value)}` }, bar,
    element("span", { class: "digits" }, isPart && value === null ? "" : show(value)),
  );
}
