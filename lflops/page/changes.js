// The modules of two windows, what changed first: what is slower or faster by the seconds that it costs, then other work, then what came
// and went. A row opens into its phases and its figures.

import { byPhase, differs, newsOf, ratioOf, workDiffers } from "./differences.js";
import { element, select } from "./dom.js";
import { between, count, duration, exact, signed, size } from "./format.js";
import { Grid } from "./grid.js";
import { isNews } from "./judging.js";
import { order } from "./rows.js";

const KINDS_OF_CHANGE = ["slower", "faster", "work changed", "added", "removed", "renamed"];
const UNCHANGED = 4; // the rank of what nothing happened to

export function changes(found, before, after, { state, remember }) {
  const rows = found.modules.map(rowOf);
  const first = [...rows].sort((a, b) => a.rank - b.rank || b.weight - a.weight || a.at - b.at);
  const most = Math.max(...rows.map(({ time }) => Math.abs(time.lost ?? 0)));
  const open = new Set();
  const grid = new Grid("modules that changed");
  const said = element("span", { class: "said", role: "status" });

  const columns = [
    { id: "kind", label: "what changed", text: (text) => text ?? "–" },
    { id: "before", label: "time before", text: duration }, { id: "after", label: "time after", text: duration },
    { id: "ratio", label: "change", text: signed },
    { id: "interval", label: "beyond the run, between", text: (text) => text ?? "–" },
    { id: "lost", label: "lost a step", text: duration },
    { id: "macs_before", label: "MACs before", text: count }, { id: "macs_after", label: "MACs after", text: count },
  ];

  function sortBy(id) {
    if (state.sort !== id) Object.assign(state, { sort: id, down: true });
    else Object.assign(state, state.down ? { down: false } : { sort: "", down: false });
    draw();
  }

  function sorted(list) {
    const isNumber = !["", "kind", "interval", undefined].includes(state.sort);
    const compare = isNumber ? order((at) => rows[at].values[state.sort] ?? null, Boolean(state.down), rows.length) : null;
    return compare ? [...list].sort((a, b) => compare(a.at, b.at)) : list;
  }

  function toggle(row) {
    if (!open.delete(row)) open.add(row);
    draw();
  }

  function draw() {
    remember();
    const wanted = (state.filter || "").toLowerCase();
    const chosen = first.filter((row) => row.names.toLowerCase().includes(wanted) && isShown(row, state.show));
    const shown = sorted(chosen).flatMap((row) => (open.has(row) ? [row, ...partsOf(row, before, after)] : [row]));
    said.textContent = chosen.length ? `${chosen.length} of ${rows.length} modules` : `none of ${rows.length} modules`;
    grid.show({
      columns: [{ id: "name", label: "module" }, ...columns].map(({ id, label }) => ({
        label, onsort: () => sortBy(id), sort: state.sort !== id ? "none" : state.down ? "descending" : "ascending",
      })),
      rows: shown,
      level: (row) => (row.above ? 2 : 1),
      isOpen: (row) => (row.above ? null : open.has(row)),
      toggle,
      cells: (row) => [nameCellOf(row, open, toggle), ...columns.map((column) => changeCell(column, row, most))],
    });
  }

  const many = (kind) => rows.filter((row) => isShown(row, kind)).length;
  const options = [["", `what changed (${many("")})`], ...KINDS_OF_CHANGE.filter(many).map((kind) => [kind, `${kind} (${many(kind)})`]), ["all", `all (${rows.length})`]];
  if (!options.some(([kind]) => kind === state.show)) state.show = "";
  const field = element("input", {
    type: "search", placeholder: "name or class", "aria-label": "filter by name or class", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const bar = element(
    "div", { class: "bar-of-controls" }, select("show", options, state.show || "", (kind) => { state.show = kind; draw(); }), field, said,
  );
  draw();
  return element("div", { class: "changes" }, bar, grid.node);
}

function isShown(row, show) {
  if (show === "all") return true;
  return show === "renamed" ? row.isRenamed : show ? row.kind === show : row.rank < UNCHANGED;
}

// What there is to say of a module, and how much it matters.
function rowOf(module, at) {
  const [{ before, after }, time] = [module, newsOf(module)];
  const last = (name) => name.slice(name.lastIndexOf(".") + 1);
  const isRenamed = Boolean(before) && Boolean(after) && last(before) !== last(after);
  const { macs } = module.own;
  let [kind, rank, weight] = [time.verdict, UNCHANGED, 0];
  if (before === null || after === null) [kind, rank] = [before === null ? "added" : "removed", 2];
  else if (isNews(time)) [rank, weight] = [0, Math.abs(time.lost)];
  else if (workDiffers(module.own)) [kind, rank, weight] = ["work changed", 1, differs(macs) ? Math.abs(Number(macs.after) - Number(macs.before)) : 0];
  else if (isRenamed) [kind, rank] = ["renamed", 3];
  const names = (isRenamed ? [before, after] : [after ?? before]).map((name) => name || "(root)").join(" → ");
  return {
    at, module, names, kind, rank, weight, isRenamed, time, isOwn: isNews(module.own.time),
    values: { kind, before: time.before, after: time.after, ratio: time.ratio, interval: time.low === null ? null : between(time), lost: time.lost, macs_before: macs.before, macs_after: macs.after },
  };
}

// What a row opens into: its phases, and what of its own figures differs.
function partsOf(row, before, after) {
  const { own, peak_bytes: peak } = row.module;
  const part = (label, change, text, more = {}) => ({ above: row, label, text, values: { before: change.before, after: change.after, ratio: ratioOf(change), ...more } });
  const ran = byPhase(before, after, row.module, row.isOwn).filter(({ seconds, macs }) => [seconds, macs].some((change) => Number(change.before) || Number(change.after)));
  const figures = [["own FLOPs", own.flops, count], ["own bytes moved", own.bytes_moved, size], ["own parameters", own.parameters, count], ["peak memory", peak, size]];
  const perMac = row.time.per_mac === null ? [] : [{ above: row, label: "time a MAC", text: duration, values: { ratio: row.time.per_mac } }];
  return [
    ...ran.map(({ phase, seconds, macs }) => part(phase, seconds, duration, { macs_before: macs.before, macs_after: macs.after })),
    ...perMac,
    ...figures.filter(([, change]) => differs(change)).map(([label, change, text]) => part(label, change, text)),
  ];
}

function nameCellOf(row, open, toggle) {
  if (row.above) return element("div", { class: "name part", role: "gridcell" }, row.label);
  return element(
    "div", { class: "name", role: "gridcell", title: row.names },
    element("button", {
      class: "toggle", type: "button", tabindex: -1, "aria-label": `${open.has(row) ? "close" : "open"} ${row.names}`, onclick: () => toggle(row),
    }, open.has(row) ? "▾" : "▸"),
    element("span", { class: "label" }, row.names), element("span", { class: "kind" }, row.module.kind),
    row.isOwn ? element("span", { class: "mark", title: "the time of the module itself, without what is below it" }, "own time") : null,
  );
}

function changeCell({ id, label, text }, row, most) {
  const value = row.values[id] ?? null;
  const show = row.above && (id === "before" || id === "after") ? row.text : text;
  const isEmpty = value === null && (row.above || id === "interval" || id === "lost");
  const title = id === "ratio" && value !== null ? signed(value) : typeof value === "string" && id !== "macs_before" && id !== "macs_after" ? value : exact(value);
  return element(
    "div", { class: `number ${id === "kind" ? `told-${(row.kind ?? "").replace(" ", "-")}` : value ? "" : "nothing"}`, role: "gridcell", title: `${label}: ${title}` },
    id === "lost" && value && most ? element("span", { class: `bar ${value > 0 ? "slower" : "faster"}`, style: { width: `${(100 * Math.abs(value)) / most}%` } }) : null,
    element("span", { class: "digits" }, isEmpty ? "" : show(value)),
  );
}
