// The view Modules: a tree or a flat list, filtered and sorted, with the columns that the user chose.

import { columns, reader, USUAL } from "../table/module_columns.js";
import { element, select } from "../lib/dom.js";
import { messageOf } from "../lib/format.js";
import { folded, runLabel } from "../table/fold.js";
import { Grid, numberCell } from "../table/virtual_table.js";
import { icicle } from "../charts/icicle.js";
import { ancestors, byName, children, depth, lastOf, matcher, openAtFirst, order, visible } from "../table/module_rows.js";

/** @type {View} */
export const modules = { id: "modules", label: "Modules", draw: drawModules };

// Its state: sort, down, flat, own, unfold, filter, regex, columns, chart, and row, the name of a module that another view opened.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawModules(payload, { state, remember }) {
  const table = payload.modules;
  const names = table.name;
  const all = names.map((_, row) => row);
  const [kinds, compiled, owner, identity] = ["kind", "compiled", "owner", "alike"].map((name) => reader(table, name));
  const below = children(names);
  const known = columns(table, all);
  const unfolded = new Set();
  let fold = folded(names.indexOf(""), below, identity, unfolded);
  const open = new Set(openAtFirst(names, fold.below));
  const grid = new Grid("modules");
  const chart = element("div", { class: "chart" });
  let top = names.indexOf("");
  const status = element("span", { class: "quiet", role: "status" });

  const chosen = () => known.filter((column) => (state.columns ? state.columns.split(",") : USUAL).includes(column.id));
  /** @type {(column: ModuleColumn) => Reader} */
  const value = (column) => (state.own ? column.own : column.total);

  // Rows that share one are sorted by their sum.
  /** @type {(column: ModuleColumn) => Reader} */
  function sorting(column) {
    return (row) => {
      const group = fold.groups.get(row);
      const [run, members] = isFolded() ? [group?.run ?? [], group?.members ?? []] : [[row], [row]];
      const one = members.length ? column.over(value(column), members) : null;
      return one === null || !column.adds ? one : Number(one) * run.length;
    };
  }

  /** @type {() => Order} */
  function comparison() {
    if (!state.sort) return null;
    if (state.sort === "name") return byName(names, state.down);
    const column = known.find((each) => each.id === state.sort);
    return column ? order(sorting(column), Boolean(state.down), names.length) : null;
  }

  /** @type {(id: string) => void} */
  function sortBy(id) {
    const firstDown = id !== "name";
    if (state.sort !== id) Object.assign(state, { sort: id, down: firstDown });
    else if (Boolean(state.down) === firstDown) state.down = !firstDown;
    else Object.assign(state, { sort: "", down: false });
    draw();
  }

  // A flat list, and modules that match a filter, are not folded.
  const isFolded = () => !(state.flat || state.filter || state.unfold);
  /** @type {(row: number) => FoldedRow} */
  const standsFor = (row) => (isFolded() && fold.groups.get(row)) || { run: [row], members: [row], first: 0 };

  /** @type {(row: number) => void} */
  function turn(row) {
    if (!unfolded.delete(row)) unfolded.add(row);
    fold = folded(names.indexOf(""), below, identity, unfolded);
  }

  // Unfold the groups that a row is hidden in, from above.
  /** @type {(row: number) => void} */
  function unfold(row) {
    for (const each of ancestors(names, row)) {
      if (fold.groups.has(each)) continue;
      const siblings = below.find((rows) => rows.includes(each)) ?? [];
      turn(siblings.slice(0, siblings.indexOf(each)).findLast((before) => fold.groups.has(before)) ?? each);
    }
  }

  // Open all above a row.
  /** @type {(row: number) => void} */
  function show(row) {
    for (const each of ancestors(names, row)) open.add(each);
    unfold(row);
  }

  /** @type {(row: number) => void} */
  function toggle(row) {
    if (!open.delete(row)) open.add(row);
    draw();
  }

  // The module that is clicked on becomes the chart's top, and the table scrolls to it; a click on the top goes up again.
  /** @type {(row: number) => void} */
  function zoom(row) {
    const above = ancestors(names, row);
    top = row === top && above.length > 1 ? above[above.length - 2] : row;
    show(top);
    draw();
    grid.go(top);
  }

  function drawChart() {
    const column = known.find(({ id }) => id === state.chart);
    chart.replaceChildren(...(column ? [icicle({ names, below, kinds, read: column.total, text: column.text, top, choose: zoom })] : []));
  }

  /** @type {(row: number) => HTMLElement} */
  function nameCell(row) {
    const isFlat = Boolean(state.flat);
    const { run, first } = standsFor(row);
    const label = names[row] === "" ? "(root)" : isFlat ? names[row] : runLabel(run.map((each) => lastOf(names[each])));
    const marks = [compiled(row) ? "compiled" : null, owner(row) === null ? null : `parameters of ${owner(row) || "the root"}`];
    const hasMore = !isFlat && below[row].length > 0;
    return element(
      "div", { class: "name", role: "gridcell", title: names[row], style: { paddingLeft: `${isFlat ? 8 : 8 + 14 * depth(names[row])}px` } },
      hasMore
        ? element("button", {
          class: "toggle", type: "button", tabindex: -1, "aria-label": `${open.has(row) ? "close" : "open"} ${label}`, onclick: () => toggle(row),
        }, open.has(row) ? "▾" : "▸")
        : element("span", { class: "toggle" }),
      element("span", { class: "label" }, label), foldButton(row, run.length, first), element("span", { class: "kind" }, kinds(row)),
      ...marks.filter(Boolean).map((mark) => element("span", { class: "mark" }, mark)),
    );
  }

  /** @type {(row: number, many: number, first: number) => HTMLElement | null} */
  function foldButton(row, many, first) {
    if (many === 1 && !first) return null;
    const [text, spoken] = first
      ? [`fold ×${first}`, `show ${first} modules that are alike as one`]
      : [`×${many}`, `show ${many} modules one by one`];
    const title = `${spoken}. They are alike: counts are those of one of them, times the mean over all of them.`;
    return element("button", { class: "mark", type: "button", "aria-label": spoken, title, onclick: () => { turn(row); draw(); } }, text);
  }

  function draw() {
    remember();
    /** @type {Reader<boolean> | null} */
    let matches = null;
    status.textContent = "";
    try {
      matches = matcher(state.filter || "", Boolean(state.regex), names, kinds);
    } catch (error) {
      status.textContent = `no regular expression: ${messageOf(error)}`;
    }
    const rows = visible({ below: isFolded() ? fold.below : below, names, open, matches, compare: comparison(), isFlat: Boolean(state.flat) });
    if (matches && !status.textContent) status.textContent = `${all.filter(matches).length} of ${names.length} match`;
    /** @type {(column: ModuleColumn) => Reader} */
    const read = (column) => (row) => column.over(value(column), standsFor(row).members);
    const shown = chosen().map((column) => ({ ...column, read: read(column), most: greatest(value(column), names.length) }));
    /** @type {GridContent["columns"]} */
    const head = [{ id: "name", label: "module" }, ...shown].map(({ id, label }) => ({
      label, onsort: () => sortBy(id), sort: state.sort !== id ? "none" : state.down ? "descending" : "ascending",
    }));
    drawChart();
    grid.show({
      columns: head,
      rows,
      level: (row) => (state.flat ? 1 : depth(names[row]) + 1),
      isOpen: (row) => (state.flat || matches || !below[row].length ? null : open.has(row)),
      toggle,
      cells: (row) => [nameCell(row), ...shown.map((column) => numberCell(column, row))],
      exported: {
        labels: ["module", "class", "modules", ...shown.map(({ label }) => label)],
        values: (row) => [names[row] || "(root)", kinds(row), standsFor(row).run.length, ...shown.map(({ read }) => read(row))],
      },
    });
  }

  const field = element("input", {
    type: "search", placeholder: "name or class", "aria-label": "filter by name or class", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const bar = element(
    "div", { class: "bar-of-controls" }, field,
    box("regex", "regex"), box("flat", "flat"), box("own", "own only"), box("unfold", "fold repeats", true),
    button("open all", () => all.forEach((row) => open.add(row))), button("close all", () => open.clear()),
    chooser(), chartChoice(), status,
  );

  // The state of a box that is usually checked is true where it is not checked.
  /** @type {(key: string, label: string, isUsual?: boolean) => HTMLElement} */
  function box(key, label, isUsual = false) {
    const change = () => { state[key] = input.checked !== isUsual; draw(); };
    const input = element("input", { type: "checkbox", checked: Boolean(state[key]) !== isUsual, onchange: change });
    return element("label", { class: "choice" }, input, label);
  }

  /** @type {(label: string, act: () => void) => HTMLElement} */
  function button(label, act) {
    return element("button", { type: "button", onclick: () => { act(); draw(); } }, label);
  }

  function chartChoice() {
    const parts = known.filter(({ id }) => /[.](macs|flops|bytes|seconds)$/.test(id)).map(({ id, label }) => [id, label]);
    return select("chart", [["", "none"], ...parts], state.chart || "", (id) => { state.chart = id; draw(); });
  }

  function chooser() {
    const list = element("div", { class: "columns" });
    for (const column of known) {
      const input = element("input", {
        type: "checkbox", value: column.id, checked: chosen().includes(column),
        onchange: () => {
          state.columns = [...list.querySelectorAll("input")].filter((each) => each.checked).map((each) => each.value).join(",") || "none";
          draw();
        },
      });
      list.append(element("label", {}, input, column.label));
    }
    return element("details", { class: "chooser" }, element("summary", {}, "columns"), list);
  }

  if (names.includes(state.row)) {
    const row = names.indexOf(state.row);
    show(row);
    requestAnimationFrame(() => { grid.go(row); grid.node.focus({ preventScroll: true }); });
  }
  draw();
  return element("section", { class: "modules", "aria-label": "modules" }, bar, chart, grid.node);
}

/** @type {(read: Reader, size: number) => number} */
function greatest(read, size) {
  let most = 0;
  for (let row = 0; row < size; row += 1) most = Math.max(most, Number(read(row) ?? 0));
  return most;
}
