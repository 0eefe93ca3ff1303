// The view Memory: a step's live memory as a timeline, and tables of what is alive at the peak.

import { memoryTimeline } from "../charts/memory_timeline.js";
import { treemap } from "../charts/treemap.js";
import { chartWidth, element, select } from "../lib/dom.js";
import { exact, percent, size, words } from "../lib/format.js";
import { stateOfModules } from "../lib/module_link.js";
import { amounts, bytesOf, plainTable, texts, valued } from "../table/plain_table.js";
import { figure } from "./summary.js";

/** @type {View} */
export const memory = { id: "memory", label: "Memory", draw: drawMemory, isSized: true };

// Tooltips of the categories; two of them are known only after the step.
/** @type {Record<string, string>} */
const CATEGORIES = {
  parameters: "parameters",
  optimizer_state: "the optimizer's state, as such from when it was made",
  other: "what was there before and is no parameter, as the batch and buffers, and what ran in no phase of the model",
  gradients: "gradients, as such from when backward made them",
  activations: "what forward made, whether it is kept for backward or not",
  temporary: "what backward and the optimizer made beside gradients and state",
};
const UNCOUNTED = "Unknown: no step was counted with its memory. "
  + "lflops.count, lflops.measure and lflops.estimate do it, and FlopsMonitor unless count=False.";
const AS_DRAWN = "Activations are what forward made, kept for backward or not. "
  + "Gradients and optimizer state are drawn as such from when they were made, though only later is known what they are.";
const LISTED = 16;

// Its state: at, the operator that the cursor is on.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawMemory(payload, context) {
  const data = payload.memory;
  // Modules whose names differ only in numbers are one line, which opens all of them.
  /** @type {(name: string) => void} */
  const openModule = (name) => context.go("modules", stateOfModules(name));
  if (!data) {
    return element(
      "section", { class: "memory", "aria-label": "memory" },
      element("p", { class: "message" }, UNCOUNTED),
    );
  }
  return element(
    "section", { class: "memory", "aria-label": "memory" },
    element("div", { class: "figures" }, ...figures(data).map((each) => figure(each))),
    element("h2", {}, "Alive through the step"),
    memoryTimeline(data, { ...context, openModule }),
    element("p", { class: "remark" }, remarks(data).join(" ")),
    ...whatLowersIt(data),
    element("h2", {}, "Alive at the peak"),
    peakMap(data, context, openModule),
    element("div", { class: "two-columns" }, categories(data), holders(data, openModule)),
    element("h2", {}, `The ${data.largest} largest storages at the peak`),
    largest(data, openModule),
  );
}

/** @type {(data: Memory) => HTMLElement[]} */
function whatLowersIt({ savings, peak_bytes: peak }) {
  if (!savings.length) return [];
  return [
    element("h2", {}, "What would lower the peak"),
    plainTable("what would lower the peak", [...texts("what"), ...amounts("saves at most", "of the peak"), ...texts("cost")], savings.map(([what, bytes, cost]) => [
      what, bytesOf(bytes), valued(Number(bytes) / Number(peak), percent), cost,
    ])),
  ];
}

// All bytes of the peak as a treemap, down to the largest storages; the smaller ones of a group are one tile.
/** @type {(data: Memory, context: Context, openModule: (name: string) => void) => HTMLElement} */
function peakMap(data, { state, remember }, openModule) {
  const { category, operator, module, pattern, number, each_bytes: each } = data.alive;
  const container = element("div", {});
  /** @type {(key: string[], groups: [string, number][]) => import("../charts/treemap.js").Group[]} */
  const grouped = (key, groups) => groups.map(([name, total]) => {
    const rows = key.map((_, row) => row).filter((row) => key[row] === name || (key === pattern && module[row] === name));
    const tiles = rows.map((row) => ({
      label: state.map === "module" ? words(category[row]) : module[row] || "(model)", value: number[row] * Number(each[row]),
      colour: `var(--memory-${CSS.escape(category[row])}, var(--rest))`,
      title: `${words(category[row])} of ${module[row] || "(model)"}: ${size(number[row] * Number(each[row]))}${number[row] > 1 ? `, ${number[row]} × ${size(each[row])}` : ""}${operator[row] ? `, made by ${operator[row]}` : ""}`,
      act: () => openModule(module[row]),
    }));
    const rest = total - tiles.reduce((sum, { value }) => sum + value, 0);
    if (rest > 0) tiles.push({ label: "smaller ones", value: rest, colour: state.map === "module" ? "var(--rest)" : `color-mix(in oklab, var(--memory-${CSS.escape(name)}, var(--rest)) 45%, var(--rest))`, title: `smaller storages of ${name || "(model)"}: ${size(rest)}`, act: () => {} });
    return { label: `${words(name) || "(model)"} ${size(total)}`, value: total, tiles };
  });
  function draw() {
    remember();
    const width = chartWidth();
    const [more, rest] = data.more;
    const groups = state.map === "module"
      ? grouped(pattern, data.modules.name.map((name, row) => [name, Number(data.modules.bytes[row])]))
      : grouped(category, data.by_category.map(([name, bytes]) => [name, Number(bytes)]));
    if (state.map === "module" && Number(rest)) groups.push({ label: `${more} more`, value: Number(rest), tiles: [{ label: "", value: Number(rest), colour: "var(--rest)", title: `${more} more modules: ${size(rest)}` }] });
    container.replaceChildren(treemap(groups, width, 320, "alive at the peak"));
  }
  const choice = select("by", [["", "category"], ["module", "module"]], state.map || "", (map) => { state.map = map; draw(); }, "group the treemap by");
  draw();
  return element("div", {}, choice, container);
}

/** @type {(data: Memory) => { label: string, text: string, remark: string }[]} */
function figures(data) {
  const of = data.rank === null ? "" : `, on rank ${data.rank}, of all ranks the most`;
  const at = (/** @type {string} */ field) => data.points[field][data.peak ?? 0];
  const reached = data.peak === null ? "" : `in ${at("phase")}, ${at("operator")} of ${at("module") || "the model itself"}`;
  const room = Number(data.peak_bytes) / Number(data.capacity_bytes);
  return [
    { bytes: data.peak_bytes, label: "peak live memory", text: size(data.peak_bytes), remark: `${reached}${of}` },
    { bytes: data.capacity_bytes, label: "of the chip's memory", text: percent(room), remark: `${size(data.capacity_bytes)}, ${data.chip}` },
  ].filter(({ bytes }) => bytes !== null);
}

/** @type {(data: Memory) => string[]} */
function remarks(data) {
  const drawn = data.points.at.length - (data.peak === null ? 0 : 1);
  const isWhole = drawn === data.operators;
  return [
    data.source === "fake" ? "Nothing was allocated: sizes are those that the tensors would have." : "Bytes of tensors; what kernels need for themselves is not among them.",
    isWhole ? "" : `Drawn are ${exact(drawn)} of ${exact(data.operators)} operators, the extremes of equal stretches.`,
    AS_DRAWN,
  ];
}

/** @type {(data: Memory) => HTMLElement} */
function categories(data) {
  const total = Number(data.peak_bytes);
  return plainTable("by category", [...texts("category"), ...amounts("bytes", "share")], data.by_category.map(([name, bytes]) => [
    element("span", { title: CATEGORIES[name] }, key(name), words(name)), bytesOf(bytes), valued(Number(bytes) / total, percent),
  ]));
}

/** @type {(data: Memory, openModule: (name: string) => void) => HTMLElement} */
function holders(data, openModule) {
  const total = Number(data.peak_bytes);
  const { name, modules, bytes } = data.modules;
  const shown = Math.min(name.length, LISTED);
  const [more, rest] = data.more;
  const left = name.length - shown + more;
  const bytesLeft = bytes.slice(shown).reduce((sum, each) => sum + Number(each), Number(rest));
  const rows = name.slice(0, shown).map((text, row) => [
    linkButton(`${text || "(model)"}${modules[row] > 1 ? ` ×${modules[row]}` : ""}`, () => openModule(text)),
    bytesOf(bytes[row]), valued(Number(bytes[row]) / total, percent),
  ]);
  return plainTable("by module", [...texts("made or owned by"), ...amounts("bytes", "share")], left ? [...rows, [`${left} more`, bytesOf(bytesLeft), valued(bytesLeft / total, percent)]] : rows);
}

/** @type {(data: Memory, openModule: (name: string) => void) => HTMLElement} */
function largest(data, openModule) {
  const { category, operator, module, phase, number, each_bytes: each } = data.alive;
  return plainTable("largest storages", [...texts("category", "module", "made by"), ...amounts("each", "number", "share")], each.map((bytes, row) => [
    element("span", { title: CATEGORIES[category[row]] ?? null }, key(category[row]), words(category[row])),
    linkButton(module[row] || "(model)", () => openModule(module[row])),
    operator[row] ? `${operator[row]} in ${phase[row]}` : "before the step",
    bytesOf(bytes), valued(number[row], exact), valued((number[row] * Number(bytes)) / Number(data.peak_bytes), percent),
  ]));
}

/** @type {(text: string, act: () => void) => HTMLElement} */
function linkButton(text, act) {
  return element("button", { type: "button", class: "leading", onclick: act }, text);
}

/** @type {(name: string) => HTMLElement} */
function key(name) {
  return element("span", { class: "key", style: { background: `var(--memory-${CSS.escape(name)}, var(--rest))` } });
}
