// The view Modules: an icicle of the time of modules, and a tree or a flat list with chosen columns, filtered and sorted.

import { colourOfShare, icicle, legendOfClasses, legendOfShares, looksOfClasses } from "../charts/icicle.js";
import { columns, reader, usualColumns, valueOf, whyUntimed } from "../table/module_columns.js";
import { element, select } from "../lib/dom.js";
import { messageOf, percent, size } from "../lib/format.js";
import { folded, runLabel } from "../table/fold.js";
import { Grid, numberCell } from "../table/virtual_table.js";
import { ancestors, byName, children, depth, lastOf, matcher, openAtFirst, order, visible } from "../table/module_rows.js";

/** @type {View} */
export const modules = { id: "modules", label: "Modules", part: "Tree", draw: drawModules };

const REMEMBERED = 60; // the most opened or closed rows that the address keeps

// State: sort, down, flat, own (self values), unfold, one, filter, regex, columns, chart, colour, top, toggled; row, the name of the chosen module.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawModules(payload, { state, remember }) {
  const table = payload.modules;
  const names = table.name;
  const root = names.indexOf("");
  const all = names.map((_, row) => row);
  const [kinds, compiled, owner, identity] = ["kind", "compiled", "owner", "identical"].map((name) => reader(table, name));
  const below = children(names);
  const looks = looksOfClasses([...new Set(all.map(kinds))]);
  const { figures } = payload.head;
  const peaks = (payload.roofline?.ceilings ?? []).filter((each) => each.is_reference).map((each) => each.flops_per_second);
  const highest = peaks.length ? Math.max(...peaks) : null;
  const known = columns(table, all, { step: figures.step ?? figures.pass ?? null, peak: payload.peak_flops_per_second, highest });
  const shownAtFirst = usualColumns(known, root);
  const usual = ["time", "forward.macs"].find((id) => known.some((column) => column.id === id)) ?? "";
  const unfolded = new Set();
  let fold = folded(root, below, identity, unfolded);
  const first = new Set(openAtFirst(names, fold.below));
  const open = new Set(first);
  for (const name of state.toggled ? state.toggled.split(",") : []) if (names.includes(name)) flip(open, names.indexOf(name));
  const grid = new Grid("modules");
  const chart = element("div", { class: "chart" });
  const status = element("span", { class: "quiet", role: "status" });

  const chosen = () => known.filter((column) => (state.columns ? state.columns.split(",") : shownAtFirst).includes(column.id));
  /** @type {(column: ModuleColumn) => Reader} */
  const value = (column) => (state.own ? column.own : column.total);
  const topRow = () => Math.max(names.indexOf(state.top || ""), 0);

  // A flat list, and modules that match a filter, are not folded.
  const isFolded = () => !(state.flat || state.filter || state.unfold);
  /** @type {(row: number) => FoldedRow} */
  const standsFor = (row) => (isFolded() && fold.groups.get(row)) || { run: [row], members: [row], first: 0 };
  /** @type {(column: ModuleColumn) => Reader} */
  const shownValue = (column) => (row) => valueOf(column, value(column), standsFor(row).members, Boolean(state.one));

  // Folded rows are sorted by their sum, whether the sum or the mean is shown.
  /** @type {() => Order} */
  function comparison() {
    const by = state.sort || usual;
    if (by === "name") return state.down || state.flat ? byName(names, Boolean(state.down)) : null;
    const column = known.find((each) => each.id === by);
    return column ? order((row) => valueOf(column, value(column), standsFor(row).members, false), state.sort ? Boolean(state.down) : true, names.length) : null;
  }

  // Clicks on a heading sort by largest first, then smallest first, then by time again. The first click on the name restores the model's order.
  /** @type {(id: string) => void} */
  function sortBy(id) {
    const firstDown = id !== "name";
    if (state.sort !== id && !(id === usual && !state.sort)) Object.assign(state, { sort: id, down: firstDown });
    else if (!state.sort || Boolean(state.down) === firstDown) Object.assign(state, { sort: id, down: !firstDown });
    else Object.assign(state, { sort: "", down: false });
    draw();
  }

  /** @type {(row: number) => void} */
  function turn(row) {
    flip(unfolded, row);
    fold = folded(root, below, identity, unfolded);
  }

  // Unfold the groups that hide a row, from the top down.
  /** @type {(row: number) => void} */
  function unfold(row) {
    for (const each of ancestors(names, row)) {
      if (fold.groups.has(each)) continue;
      const siblings = below.find((rows) => rows.includes(each)) ?? [];
      turn(siblings.slice(0, siblings.indexOf(each)).findLast((before) => fold.groups.has(before)) ?? each);
    }
  }

  // Open all parents of a row.
  /** @type {(row: number) => void} */
  function show(row) {
    for (const each of ancestors(names, row)) if (each !== row) open.add(each);
    if (isFolded()) unfold(row);
  }

  function rememberOpen() {
    const toggled = all.filter((row) => open.has(row) !== first.has(row)).map((row) => names[row]);
    state.toggled = toggled.length > REMEMBERED ? "" : toggled.join(",") || (toggled.length ? "," : "");
  }

  /** @type {(row: number) => void} */
  function toggle(row) {
    flip(open, row);
    rememberOpen();
    draw();
  }

  /** @type {(row: number) => void} */
  function zoom(row) {
    state.top = names[row];
    draw();
    /** @type {HTMLElement | null} */ (chart.querySelector(".icicle"))?.focus();
  }

  // A module that is clicked in the chart is chosen in the table.
  /** @type {(row: number) => void} */
  function choose(row) {
    show(row);
    open.add(row);
    rememberOpen();
    drawTable();
    grid.go(row);
  }

  /** @type {(row: number) => string} */
  function shortName(row) {
    return names[row] === "" ? "(model)" : runLabel(standsFor(row).run.map((each) => lastOf(names[each])));
  }

  /** @type {(column: ModuleColumn) => Reader<string>} */
  function describer(column) {
    const find = (/** @type {string} */ id) => known.find((each) => each.id === id);
    const [share, mfu, peak] = [find("share"), find("mfu"), find("peak_bytes")];
    return (row) => {
      const { members } = standsFor(row);
      /** @type {(of: ModuleColumn | undefined, read: "own" | "total", text: Format, what: string) => string | null} */
      const part = (of, read, text, what) => {
        const figure = of ? valueOf(of, of[read], members, false) : null;
        return figure === null ? null : what.replace("*", text(figure));
      };
      const many = members.length > 1 ? ` ×${members.length}` : "";
      return [
        `${names[row] || "(model)"}${many} ${kinds(row)}: ${column.label} ${column.text(valueOf(column, column.total, members, false))}`,
        part(column, "own", column.text, "self *"), part(share, "total", percent, "* of the step"), part(mfu, "total", percent, "* of the peak"),
        part(peak, "total", size, "peak memory *"),
      ].filter(Boolean).join(" · ");
    };
  }

  function drawChart() {
    const column = known.find(({ id }) => id === (state.chart || usual));
    if (!column || state.chart === "none") {
      chart.replaceChildren();
      return;
    }
    const top = topRow();
    const mfu = known.find(({ id }) => id === "mfu");
    const isByShare = state.colour === "mfu" && mfu;
    const matches = found();
    const parts = state.unfold ? below : fold.below;
    const standing = state.unfold ? (/** @type {number} */ row) => [row] : (/** @type {number} */ row) => fold.groups.get(row)?.members ?? [row];
    /** @type {Set<string>} */
    const shownKinds = new Set([kinds(top)]);
    for (const waiting = [top]; waiting.length && shownKinds.size < 24;) {
      for (const row of parts[waiting.shift() ?? 0]) { shownKinds.add(kinds(row)); waiting.push(row); }
    }
    chart.replaceChildren(icicle({
      below: parts, label: shortName, full: (row) => `${names[row] || "(model)"} ${kinds(row)}`, describe: describer(column), top,
      above: ancestors(names, top).slice(0, -1), zoom, choose, title: `${column.label} of ${names[top] || "the model"} by module`,
      read: (row) => valueOf(column, column.total, standing(row), false),
      colour: (row) => (isByShare ? colourOfShare(valueOf(mfu, mfu.total, standing(row), false)) : looks.get(kinds(row)) ?? "var(--rest)"),
      isFound: matches && ((row) => standing(row).some(matches)),
      legend: isByShare ? legendOfShares() : legendOfClasses([...shownKinds].filter(Boolean), looks),
    }));
  }

  /** @type {() => Reader<boolean> | null} */
  function found() {
    try {
      return matcher(state.filter || "", Boolean(state.regex), names, kinds);
    } catch {
      return null;
    }
  }

  /** @type {(row: number) => HTMLElement} */
  function nameCell(row) {
    const isFlat = Boolean(state.flat);
    const { run, first: firstOfRun } = standsFor(row);
    const label = names[row] === "" ? "(model)" : isFlat ? names[row] : runLabel(run.map((each) => lastOf(names[each])));
    const marks = [compiled(row) ? "compiled" : null, owner(row) === null ? null : `shares parameters of ${owner(row) || "the model itself"}`];
    const hasMore = !isFlat && below[row].length > 0;
    return element(
      "div", { class: "name", role: "rowheader", title: names[row], style: { paddingLeft: `${isFlat ? 8 : 8 + 14 * depth(names[row])}px` } },
      hasMore
        ? element("button", {
          class: "toggle", type: "button", tabindex: -1, "aria-label": `${open.has(row) ? "close" : "open"} ${label}`, onclick: () => toggle(row),
        }, open.has(row) ? "▾" : "▸")
        : element("span", { class: "toggle" }),
      element("span", { class: "label" }, label), foldButton(row, run.length, firstOfRun), element("span", { class: "kind" }, kinds(row)),
      ...marks.filter(Boolean).map((mark) => element("span", { class: "mark" }, mark)),
    );
  }

  /** @type {(row: number, many: number, firstOfRun: number) => HTMLElement | null} */
  function foldButton(row, many, firstOfRun) {
    if (many === 1 && !firstOfRun) return null;
    const [text, spoken] = firstOfRun
      ? [`fold ×${firstOfRun}`, `show ${firstOfRun} identical modules as one`]
      : [`×${many}`, `show ${many} modules one by one`];
    const title = `${spoken}. All counts of these modules are equal. Their shared row shows the ${state.one ? "mean" : "sum"}.`;
    return element("button", { class: "mark", type: "button", tabindex: -1, "aria-label": spoken, title, onclick: () => { turn(row); draw(); } }, text);
  }

  // Why a value is unknown.
  /** @type {(column: ModuleColumn) => Reader<string>} */
  function reason(column) {
    const isTime = /time|share|mfu|seconds|[.]rate|device/.test(column.id);
    if (state.own && column.own(root) === null && column.total(root) !== null && !isTime) return () => "only the inclusive value is known";
    const why = whyUntimed(table, column.id, Boolean(state.own));
    const read = value(column);
    // For several modules, the reason is that of the first module with an unknown value.
    return (row) => (isTime ? why(standsFor(row).members.find((member) => read(member) === null) ?? row) : "this profile does not have the value");
  }

  function drawTable() {
    remember();
    /** @type {Reader<boolean> | null} */
    let matches = null;
    status.textContent = "";
    try {
      matches = matcher(state.filter || "", Boolean(state.regex), names, kinds);
    } catch (error) {
      status.textContent = `invalid regular expression: ${messageOf(error)}`;
    }
    const rows = visible({ below: isFolded() ? fold.below : below, names, open, matches, compare: comparison(), isFlat: Boolean(state.flat) });
    if (matches && !status.textContent) status.textContent = `${all.filter(matches).length} of ${names.length} match`;
    const shown = chosen().map((column) => {
      const read = shownValue(column);
      return { ...column, read, most: greatest(read, rows), reason: reason(column) };
    });
    /** @type {GridContent["columns"]} */
    const head = [{ id: "name", label: "module" }, ...shown].map(({ id, label }) => ({
      label, onsort: () => sortBy(id),
      sort: (state.sort || usual) !== id ? "none" : (state.sort ? state.down : true) ? "descending" : "ascending",
    }));
    grid.show({
      columns: head,
      rows,
      level: (row) => (state.flat ? 1 : depth(names[row]) + 1),
      isOpen: (row) => (state.flat || matches || !below[row].length ? null : open.has(row)),
      toggle,
      onchoose: (row) => { if (state.row !== names[row]) { state.row = names[row]; remember(); } },
      cells: (row) => [nameCell(row), ...shown.map((column) => numberCell(column, row))],
      exported: {
        labels: ["module", "class", "modules", ...shown.map(({ label }) => label)],
        values: (row) => [names[row] || "(model)", kinds(row), standsFor(row).run.length, ...shown.map(({ read }) => read(row))],
      },
    });
  }

  function draw() {
    if (foldBox) foldBox.disabled = Boolean(state.flat || state.filter);
    drawTable();
    drawChart();
  }

  /** @type {HTMLInputElement | null} */
  let foldBox = null;
  const field = element("input", {
    type: "search", placeholder: "name or class", "aria-label": "filter by name or class", value: state.filter || "",
    oninput: () => { state.filter = field.value; draw(); },
  });
  const bar = element(
    "div", { class: "bar-of-controls" }, field,
    box("regex", "regex"), box("flat", "flat"), box("own", "self only"), box("unfold", "fold identical modules", true), box("one", "mean of identical modules"),
    button("open all", () => all.forEach((row) => open.add(row))), button("close all", () => open.clear()),
    chooser(), chartChoice(), colourChoice(), status,
  );

  // A box that is checked by default has the state "true" if it is not checked.
  /** @type {(key: string, label: string, isUsual?: boolean) => HTMLElement} */
  function box(key, label, isUsual = false) {
    const change = () => { state[key] = input.checked !== isUsual ? "true" : ""; draw(); };
    const input = element("input", { type: "checkbox", checked: Boolean(state[key]) !== isUsual, onchange: change });
    if (key === "unfold") foldBox = input;
    return element("label", { class: "choice" }, input, label);
  }

  /** @type {(label: string, act: () => void) => HTMLElement} */
  function button(label, act) {
    return element("button", { type: "button", onclick: () => { act(); rememberOpen(); draw(); } }, label);
  }

  function chartChoice() {
    const parts = known.filter(({ id }) => id === "time" || /[.](macs|flops|bytes|seconds)$/.test(id)).map(({ id, label }) => [id, label]);
    return select("chart", [["none", "none"], ...parts], state.chart || usual || "none", (id) => { state.chart = id; draw(); });
  }

  function colourChoice() {
    if (!known.some(({ id }) => id === "mfu")) return null;
    return select("colour", [["", "class"], ["mfu", "share of peak"]], state.colour || "", (colour) => { state.colour = colour; draw(); });
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

/** @type {(rows: Set<number>, row: number) => void} */
function flip(rows, row) {
  if (!rows.delete(row)) rows.add(row);
}

/** @type {(read: Reader, rows: number[]) => number} */
function greatest(read, rows) {
  let most = 0;
  for (const row of rows) most = Math.max(most, Number(read(row) ?? 0));
  return most;
}
