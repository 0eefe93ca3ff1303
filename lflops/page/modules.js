// The modules of a profile: a tree or a flat list, filtered, sorted, with the columns that are asked for.

import { columns, reader, USUAL } from "./columns.js";
import { element, select } from "./dom.js";
import { exact } from "./format.js";
import { Grid } from "./grid.js";
import { icicle } from "./icicle.js";
import { byName, children, depth, matcher, order, visible } from "./rows.js";

const OPEN_AT_FIRST = 200;

export const modules = { id: "modules", label: "Modules", draw: drawModules };

// Its state: sort, down, flat, own, filter, regex, columns, chart, and row, the name of a module that another view led to.
function drawModules(payload, { state, remember }) {
  const table = payload.modules;
  const names = table.name;
  const all = names.map((_, row) => row);
  const [kinds, compiled, owner] = ["kind", "compiled", "owner"].map((name) => reader(table, name));
  const below = children(names);
  const known = columns(table, all);
  const open = new Set(openAtFirst(names, below));
  const grid = new Grid("modules");
  const chart = element("div", { class: "chart" });
  let top = names.indexOf("");
  const said = element("span", { class: "said", role: "status" });

  const chosen = () => known.filter((column) => (state.columns ? state.columns.split(",") : USUAL).includes(column.id));
  const value = (column) => (state.own ? column.own : column.total);

  function comparison() {
    if (!state.sort) return null;
    if (state.sort === "name") return byName(names, state.down);
    const column = known.find((each) => each.id === state.sort);
    return column ? order(value(column), Boolean(state.down), names.length) : null;
  }

  function sortBy(id) {
    const firstDown = id !== "name";
    if (state.sort !== id) Object.assign(state, { sort: id, down: firstDown });
    else if (Boolean(state.down) === firstDown) state.down = !firstDown;
    else Object.assign(state, { sort: "", down: false });
    draw();
  }

  function toggle(row) {
    if (!open.delete(row)) open.add(row);
    draw();
  }

  function unfold(name) {
    for (let above = name; above !== ""; above = above.slice(0, Math.max(above.lastIndexOf("."), 0))) open.add(names.indexOf(above));
    open.add(names.indexOf(""));
  }

  // What is clicked on becomes the chart's top, and the table goes to it; a click on the top goes up again.
  function zoom(row) {
    top = row !== top || names[row] === "" ? row : names.indexOf(names[row].slice(0, Math.max(names[row].lastIndexOf("."), 0)));
    unfold(names[top]);
    draw();
    grid.go(top);
  }

  function drawChart() {
    const column = known.find(({ id }) => id === state.chart);
    chart.replaceChildren(...(column ? [icicle({ names, below, kinds, read: column.total, text: column.text, top, choose: zoom })] : []));
  }

  function nameCell(row) {
    const isFlat = Boolean(state.flat);
    const label = names[row] === "" ? "(root)" : isFlat ? names[row] : names[row].slice(names[row].lastIndexOf(".") + 1);
    const marks = [compiled(row) ? "compiled" : null, owner(row) === null ? null : `parameters of ${owner(row) || "the root"}`];
    const hasMore = !isFlat && below[row].length > 0;
    return element(
      "div", { class: "name", role: "gridcell", title: names[row], style: { paddingLeft: `${isFlat ? 8 : 8 + 14 * depth(names[row])}px` } },
      hasMore
        ? element("button", {
          class: "toggle", type: "button", tabindex: -1, "aria-label": `${open.has(row) ? "close" : "open"} ${label}`, onclick: () => toggle(row),
        }, open.has(row) ? "▾" : "▸")
        : element("span", { class: "toggle" }),
      element("span", { class: "label" }, label), element("span", { class: "kind" }, kinds(row)),
      ...marks.filter(Boolean).map((mark) => element("span", { class: "mark" }, mark)),
    );
  }

  function draw() {
    remember();
    let matches = null;
    said.textContent = "";
    try {
      matches = matcher(state.filter || "", Boolean(state.regex), names, kinds);
    } catch (error) {
      said.textContent = `no regular expression: ${error.message}`;
    }
    const rows = visible({ below, names, open, matches, compare: comparison(), isFlat: Boolean(state.flat) });
    if (matches && !said.textContent) said.textContent = `${all.filter(matches).length} of ${names.length} match`;
    const shown = chosen().map((column) => ({ ...column, read: value(column), most: greatest(value(column), names.length) }));
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
    });
  }

  const field = element("input", {
    type: "search", placeholder: "name or class", "aria-label": "filter by name or class", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const bar = element(
    "div", { class: "bar-of-controls" }, field,
    box("regex", "regex"), box("flat", "flat"), box("own", "own only"),
    button("open all", () => all.forEach((row) => open.add(row))), button("close all", () => open.clear()),
    chooser(), chartChoice(), said,
  );

  function box(key, label) {
    const input = element("input", { type: "checkbox", checked: Boolean(state[key]), onchange: () => { state[key] = input.checked; draw(); } });
    return element("label", { class: "choice" }, input, label);
  }

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
          state.columns = [...list.querySelectorAll("input:checked")].map((each) => each.value).join(",") || "none";
          draw();
        },
      });
      list.append(element("label", {}, input, column.label));
    }
    return element("details", { class: "chooser" }, element("summary", {}, "columns"), list);
  }

  if (names.includes(state.row)) {
    unfold(state.row.slice(0, Math.max(state.row.lastIndexOf("."), 0)));
    requestAnimationFrame(() => { grid.go(names.indexOf(state.row)); grid.node.focus({ preventScroll: true }); });
  }
  draw();
  return element("section", { class: "modules", "aria-label": "modules" }, bar, chart, grid.node);
}

function numberCell(column, row) {
  const value = column.read(row);
  const share = value === null || !column.most ? 0 : Math.min(Number(value) / column.most, 1);
  return element(
    "div", { class: value === null || Number(value) === 0 ? "number nothing" : "number", role: "gridcell", title: `${column.label}: ${exact(value)}` },
    element("span", { class: "bar", style: { width: `${100 * share}%` } }), element("span", { class: "digits" }, column.text(value)),
  );
}

function greatest(read, size) {
  let most = 0;
  for (let row = 0; row < size; row += 1) most = Math.max(most, Number(read(row) ?? 0));
  return most;
}

// Level by level, as long as that is not more than can be looked over.
function openAtFirst(names, below) {
  const open = [];
  let level = [names.indexOf("")];
  let shown = 1;
  while (level.length) {
    const next = level.flatMap((row) => below[row]);
    shown += next.length;
    if (shown > OPEN_AT_FIRST && open.length) break;
    open.push(...level);
    level = next;
  }
  return open;
}
