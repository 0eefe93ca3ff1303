// A snapshot of CUDA memory: why it ran out, live bytes over the allocator's record, and live tensors by category, line and file.

import { memoryTimeline } from "../charts/memory_timeline.js";
import { treemap } from "../charts/treemap.js";
import { chartWidth, element, select } from "../lib/dom.js";
import { exact, percent, size, words } from "../lib/format.js";
import { amounts, bytesOf, plainTable, texts, valued } from "../table/plain_table.js";

const LISTED = 50;

// State: at, the entry at the cursor; map, the grouping of the treemap.
/** @type {(data: Snapshot, state: State) => HTMLElement} */
export function snapshot(data, state) {
  const stack = element("pre", { class: "remark", "aria-label": "stack" });
  /** @type {(row: number) => void} */
  const showStack = (row) => { stack.textContent = `${described(data, row)}\n${data.holders.stack[row] || "no stack was recorded"}`; };
  const [cause, ...facts] = data.sentences;
  const marked = data.ran_out ? "failure" : "peak";
  return element(
    "section", { class: "memory", "aria-label": "memory" },
    element("h2", {}, cause), ...facts.map((text) => element("p", {}, text)),
    element("h2", {}, "What would free memory"), element("ul", {}, ...data.remedies.map((text) => element("li", {}, text))),
    ...(data.peak === null ? [] : [
      element("h2", {}, "Live memory over the allocator's record"),
      memoryTimeline(data, { state, remember: () => {}, openModule: () => {}, unit: "entry", moment: "after", marked }),
      element("p", { class: "remark" }, `The chart shows ${exact(data.points.at.length)} of ${exact(data.operators)} entries of the allocator's record.`),
    ]),
    element("h2", {}, `Alive at the ${marked}`),
    peakMap(data, state, showStack), stack,
    plainTable("by category", [...texts("category"), ...amounts("bytes", "share")], data.by_category.map(([name, bytes]) => [words(name), ...shares(data, bytes)])),
    element("h2", {}, "By line of code"),
    plainTable("by line of code", [...texts("category", "line"), ...amounts("number", "bytes", "share")], data.holders.bytes.slice(0, LISTED).map((bytes, row) => [
      words(data.holders.category[row]),
      element("button", { type: "button", class: "leading", title: data.holders.stack[row], onclick: () => showStack(row) }, data.holders.line[row] || "no stack"),
      valued(data.holders.count[row], exact), ...shares(data, bytes),
    ])),
    ...(data.by_module === null ? [] : byModule(data.by_module)),
  );
}

// Bytes of modules when each phase has the most live memory, and, in the last column, at the moment that is explained.
/** @type {(found: NonNullable<Snapshot["by_module"]>) => HTMLElement[]} */
function byModule({ matched_share: matched, moments }) {
  const held = Object.values(moments);
  const last = held[held.length - 1];
  const names = [...new Set(held.flatMap(Object.keys))].sort((one, other) => Number(last[other] ?? 0) - Number(last[one] ?? 0));
  return [
    element("h2", {}, "By module of the profile"),
    element("p", { class: "remark" }, `${percent(matched)} of the bytes that forward and backward allocated could be assigned to modules of the profile.`),
    plainTable("by module", [...texts("module"), ...amounts(...Object.keys(moments))], names.slice(0, LISTED).map((name) => [name, ...held.map((each) => bytesOf(each[name] ?? 0))])),
  ];
}

/** @type {(data: Snapshot, state: State, showStack: (row: number) => void) => HTMLElement} */
function peakMap(data, state, showStack) {
  const { holders } = data;
  const container = element("div", {});
  const rows = holders.bytes.map((_, row) => row);
  function draw() {
    const key = holders[state.map || "category"];
    const names = [...new Set(key)];
    const groups = names.map((name) => {
      const tiles = rows.filter((row) => key[row] === name).map((row) => ({
        label: state.map === "line" ? words(holders.category[row]) : holders.line[row] || "no stack", value: Number(holders.bytes[row]),
        colour: `var(--memory-${CSS.escape(holders.category[row])}, var(--rest))`, title: described(data, row), act: () => showStack(row),
      }));
      const known = tiles.reduce((sum, { value }) => sum + value, 0);
      const value = state.map ? known : Number(data.by_category.find(([category]) => category === name)?.[1] ?? known);
      if (value > known) tiles.push({ label: "smaller tensors", value: value - known, colour: "var(--rest)", title: `smaller tensors of ${words(name)}: ${size(value - known)}`, act: () => {} });
      return { label: `${words(name) || "no stack"} ${size(value)}`, value, tiles };
    });
    container.replaceChildren(treemap(groups, chartWidth(), 320, "alive at the peak"));
  }
  const choices = [["", "category"], ["line", "line of code"], ["file", "file"]];
  const choice = select("by", choices, state.map || "", (map) => { state.map = map; draw(); }, "group the treemap by");
  draw();
  return element("div", {}, choice, container);
}

/** @type {(data: Snapshot, row: number) => string} */
function described({ holders }, row) {
  return `${words(holders.category[row])}, ${exact(holders.count[row])} × ${holders.line[row] || "no stack"}: ${size(holders.bytes[row])}`;
}

/** @type {(data: Snapshot, bytes: Count) => HTMLElement[]} */
function shares(data, bytes) {
  const total = data.by_category.reduce((sum, [, each]) => sum + Number(each), 0);
  return [bytesOf(bytes), valued(Number(bytes) / total, percent)];
}
