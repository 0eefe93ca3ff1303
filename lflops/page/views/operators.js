// The view Operators: the work of each operator, by phase and by module, and the kernels of compiled code.

import { reader } from "../table/module_columns.js";
import { element, select } from "../lib/dom.js";
import { count, duration, exact, percent, size } from "../lib/format.js";
import { sortedTable } from "../table/sorted_table.js";

/** @type {View} */
export const operators = { id: "operators", label: "Operators", within: "modules", has: ({ operators: data }) => data !== null, draw: drawOperators };

/** @type {Record<string, string>} */
const KINDS = { counted: "", "no formula": "no formula: not in any total", traced: "only in the trace" };

/** @type {[string, string, Format][]} */
const FIGURES = [["calls", "calls", count], ["macs", "MACs", count], ["flops", "FLOPs", count], ["bytes_moved", "bytes moved", size]];

// State: table, which is `kernels` for compiled code; phase, filter, sort, down.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawOperators(payload, context) {
  const { state, remember, go } = context;
  const data = /** @type {Operators} */ (payload.operators);
  if (data.kernels && state.table === "kernels") return drawKernels(data.kernels, payload, context);
  const { table } = data;
  const all = table.operator.map((_, row) => row);
  const [kind, dtype] = [reader(table, "kind"), reader(table, "dtype")];
  const phases = [...new Set(table.phase)];
  const status = element("span", { class: "quiet", role: "status" });
  const within = element("div", { class: "within" });
  const rows = sortedTable("operators", {
    size: all.length, usual: "share", first: name, state, changed: remember, pinned: (row) => kind(row) === "no formula", onchoose: open,
  });

  /** @type {(row: number) => HTMLElement} */
  function name(row) {
    const mark = KINDS[kind(row)];
    return element(
      "div", { class: "name", role: "gridcell", title: table.operator[row] },
      element("span", { class: "label" }, table.operator[row]),
      mark ? element("span", { class: kind(row) === "no formula" ? "mark wrong" : "mark" }, mark) : null,
    );
  }

  /** @type {(row: number) => void} */
  function open(row) {
    within.hidden = false;
    within.replaceChildren(...modulesThatRan(data, row, payload.modules.name, (module) => go("modules", { filter: "", flat: "", row: module })));
  }

  function draw() {
    remember();
    const phase = [...phases, "each"].includes(state.phase) ? state.phase : "all";
    const wanted = (state.filter || "").toLowerCase();
    const ofPhase = all.filter((row) => (phase === "each" ? table.phase[row] !== "all" : table.phase[row] === phase));
    const shown = ofPhase.filter((row) => `${table.operator[row]} ${dtype(row) ?? ""}`.toLowerCase().includes(wanted));
    status.textContent = wanted ? `${shown.length} of ${ofPhase.length} match` : "";
    within.hidden = true;
    rows.show(shown, operatorColumns(table, shown, phase));
  }

  const field = element("input", {
    type: "search", placeholder: "name or dtype", "aria-label": "filter by name or dtype", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const single = phases.filter((phase) => phase !== "all").map((phase) => [phase, phase]);
  const choice = select("phase", [["all", "all together"], ["each", "one row per phase"], ...single], state.phase || "all", (phase) => {
    state.phase = phase;
    draw();
  });
  draw();
  return element(
    "section", { class: "operators", "aria-label": "operators" },
    element("div", { class: "bar-of-controls" }, data.kernels ? tables("", go) : null, field, choice, status), caveat(data.unsupported), rows.node, within,
  );
}

// The kernels of compiled code, with a row for each of their modules. The name links to the module.
/** @type {(data: Kernels, payload: Payload, context: Context) => HTMLElement} */
function drawKernels({ table, left_out: leftOut, timed_on: side, graphs, assigned, fused }, payload, { state, remember, go }) {
  const names = payload.modules.name;
  const all = table.name.map((_, row) => row);
  const modules = reader(table, "modules");
  /** @type {(row: number) => void} */
  const enter = (row) => go("modules", { filter: "", flat: "", row: names[table.module[row]] });
  /** @type {(row: number) => HTMLElement} */
  const name = (row) => element(
    "div", { class: "name", role: "gridcell", title: table.name[row] },
    element("button", {
      type: "button", class: "label to-row", tabindex: -1, title: `${names[table.module[row]] || "(model)"}: show it in Modules`, onclick: () => enter(row),
    }, table.name[row]),
    Number(modules(row)) > 1 ? element("span", { class: "mark" }, "fused") : null,
  );
  const sheet = sortedTable("kernels of compiled code", { size: all.length, usual: "seconds", first: name, state, changed: remember, onenter: enter });
  /** @type {(id: string, label: string, text?: Format, hasBar?: boolean) => FlatColumn} */
  const column = (id, label, text, hasBar) => ({ id, label, text, hasBar, read: reader(table, id) });
  const columns = [
    column("name", "kernel"), { id: "module", label: "module", read: (/** @type {number} */ row) => names[table.module[row]] || "(model)" },
    column("phase", "phase"), column("seconds", `${side} time, traced`, duration, true), column("share", "share of time in compiled code", percent),
    column("fused_bytes", "fused bytes moved", size), column("modules", "modules in kernel", count), column("calls", "calls", count),
  ];

  function draw() {
    remember();
    const wanted = (state.filter || "").toLowerCase();
    sheet.show(all.filter((row) => `${table.name[row]} ${names[table.module[row]]}`.toLowerCase().includes(wanted)), columns);
  }

  const field = element("input", {
    type: "search", placeholder: "kernel or module", "aria-label": "filter by kernel or module", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const parts = [
    `The table covers ${exact(graphs)} compiled graph${graphs === 1 ? "" : "s"}.`, `${percent(assigned)} of the time in compiled code belongs to known modules.`,
    `Kernels that combine operators of several modules took ${percent(fused)} of this time. It is divided among the modules in proportion to the bytes that their operators move.`,
    "All figures are means over the traced batches.", leftOut ? `${exact(leftOut)} more kernels with less time are left out.` : "",
  ].filter(Boolean);
  draw();
  return element(
    "section", { class: "operators", "aria-label": "kernels of compiled code" },
    element("div", { class: "bar-of-controls" }, tables("kernels", go), field), element("p", { class: "remark" }, parts.join(" ")), sheet.node,
  );
}

// The choice between the two tables.
/** @type {(shown: string, go: Context["go"]) => HTMLElement} */
function tables(shown, go) {
  return select("table", [["", "operators"], ["kernels", "kernels of compiled code"]], shown, (table) => go("operators", { table, filter: "", sort: "", down: false }));
}

/** @type {(unsupported: number) => HTMLElement | null} */
function caveat(uncounted) {
  if (!uncounted) return null;
  const ran = uncounted === 1 ? "1 operator has no formula, so its work is" : `${exact(uncounted)} operators have no formula, so their work is`;
  return element("p", { class: "caveat", role: "note" }, `${ran} not included in any total. lflops.register_formula adds a formula.`);
}

// The columns that have a value in any of these rows.
/** @type {(table: Operators["table"], shown: number[], phase: string) => FlatColumn[]} */
function operatorColumns(table, shown, phase) {
  /** @type {(id: string, label: string, text?: Format, hasBar?: boolean) => FlatColumn} */
  const column = (id, label, text, hasBar) => ({ id, label, text, hasBar, read: reader(table, id) });
  const shares = [...new Set(shown.map(reader(table, "share_of")))].filter(Boolean);
  /** @type {Record<string, boolean>} */
  const isShown = { operator: true, phase: phase === "each", dtype: true, share: true };
  return [
    column("operator", "operator"), column("phase", "phase"), column("dtype", "dtype"),
    column("calls", "calls", count), column("macs", "MACs", count), column("flops", "FLOPs", count),
    column("share", shares.length === 1 ? `share of ${shares[0]}` : "share of its phase", percent, true),
    column("bytes_moved", "bytes moved", size), column("intensity", "FLOPs/byte", count),
    column("self_device_seconds", "self device time, traced", duration, true), column("device_seconds", "device time, traced", duration),
    column("self_host_seconds", "self host time, traced", duration, true), column("host_seconds", "host time, traced", duration),
  ].filter(({ id, read }) => isShown[id] ?? shown.some((row) => Number(read(row) ?? 0) !== 0));
}

// The modules that ran an operator, the largest share first, with links to their rows.
/** @type {(data: Operators, row: number, names: string[], go: (module: string) => void) => Node[]} */
function modulesThatRan({ table, within }, row, names, go) {
  const operator = table.operator[row];
  const where = [table.phase[row] === "all" ? "in all phases" : `in ${table.phase[row]}`, reader(table, "dtype")(row)];
  const head = [element("h2", {}, operator), element("p", { class: "remark" }, where.filter(Boolean).join(", "))];
  const listed = within.row.flatMap((each, at) => (each === row ? [at] : []));
  if (!listed.length) return [...head, element("p", {}, "The operator is only in the trace, so the modules that ran it are unknown.")];
  const figures = FIGURES
    .map(([id, label, text]) => ({ label, text, read: reader(within, id) }))
    .filter(({ read }) => listed.some((at) => Number(read(at) ?? 0) !== 0));
  /** @type {(label: string) => HTMLElement} */
  const title = (label) => element("th", { scope: "col" }, label);
  /** @type {(name: string) => HTMLElement} */
  const module = (name) => element("button", {
    type: "button", class: "to-row", title: `${name || "(model)"}: show it in Modules`, onclick: () => go(name),
  }, name || "(model)");
  const more = Number(reader(table, "modules")(row)) - listed.length;
  return [
    ...head,
    element(
      "table", { "aria-label": `modules that ran ${operator}` },
      element("thead", {}, element("tr", {}, title("module"), ...figures.map(({ label }) => title(label)))),
      element("tbody", {}, ...listed.map((at) => element(
        "tr", {}, element("th", { scope: "row" }, module(names[within.module[at]])),
        ...figures.map(({ text, read }) => element("td", { title: exact(read(at)) }, text(read(at)))),
      ))),
    ),
    ...(more > 0 ? [element("p", { class: "remark" }, `and ${exact(more)} more modules with less work`)] : []),
  ];
}
