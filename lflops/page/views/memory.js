// The view Memory: live memory over a step, and tables of the live tensors at the peak.

import { memoryTimeline } from "../charts/memory_timeline.js";
import { treemap } from "../charts/treemap.js";
import { chartWidth, element, select } from "../lib/dom.js";
import { exact, percent, size, words } from "../lib/format.js";
import { stateOfModules } from "../lib/module_link.js";
import { amounts, bytesOf, plainTable, texts, valued } from "../table/plain_table.js";
import { figure } from "./window.js";

/** @type {View} */
export const memory = { id: "memory", label: "Memory", has: ({ memory: data }) => data !== null, draw: drawMemory, isSized: true };

// Tooltips of the categories.
/** @type {Record<string, string>} */
const CATEGORIES = {
  parameters: "parameters of the model",
  optimizer_state: "optimizer state, from the moment it was created",
  other: "tensors that existed before the step and are not parameters, such as the batch and buffers; also tensors created outside the phases of the model",
  gradients: "gradients, from the moment backward created them",
  activations: "tensors created in forward, whether they are kept for backward or not",
  temporary: "tensors created in backward and by the optimizer, except for gradients and optimizer state",
};
const AS_DRAWN = "Activations are all tensors created in forward, whether they are kept for backward or not. "
  + "Gradients and optimizer state are shown from the moment they were created.";
const LISTED = 16;

// State: at, the operator at the cursor.
/** @type {(payload: Payload, context: Context) => HTMLElement} */
function drawMemory(payload, context) {
  const data = /** @type {Memory} */ (payload.memory);
  // Modules whose names differ only in numbers share a line, which opens all of them.
  /** @type {(name: string) => void} */
  const openModule = (name) => context.go("modules", stateOfModules(name));
  return element(
    "section", { class: "memory", "aria-label": "memory" },
    element("div", { class: "figures" }, ...figures(data).map((each) => figure(each))),
    element("h2", {}, "Live memory over the step"),
    memoryTimeline(data, { ...context, openModule }),
    element("p", { class: "remark" }, remarks(data).join(" ")),
    ...whatLowersIt(data),
    element("h2", {}, "Live memory at the peak"),
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
    element("h2", {}, "How to lower the peak"),
    plainTable("how to lower the peak", [...texts("change"), ...amounts("saves at most", "share of the peak"), ...texts("cost")], savings.map(([what, bytes, cost]) => [
      what, bytesOf(bytes), valued(Number(bytes) / Number(peak), percent), cost,
    ])),
  ];
}

// All bytes of the peak as a treemap of the largest storages. The smaller storages of a group share a tile.
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
      title: `${words(category[row])} of ${module[row] || "(model)"}: ${size(number[row] * Number(each[row]))}${number[row] > 1 ? `, ${number[row]} × ${size(each[row])}` : ""}${operator[row] ? `, created by ${operator[row]}` : ""}`,
      act: () => openModule(module[row]),
    }));
    const rest = total - tiles.reduce((sum, { value }) => sum + value, 0);
    if (rest > 0) tiles.push({ label: "smaller storages", value: rest, colour: state.map === "module" ? "var(--rest)" : `color-mix(in oklab, var(--memory-${CSS.escape(name)}, var(--rest)) 45%, var(--rest))`, title: `smaller storages of ${name || "(model)"}: ${size(rest)}`, act: () => {} });
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
  const of = data.rank === null ? "" : `, on rank ${data.rank}, which has the largest peak of all ranks`;
  const at = (/** @type {string} */ field) => data.points[field][data.peak ?? 0];
  const reached = data.peak === null ? "" : `in ${at("phase")}, during ${at("operator")} of ${at("module") || "the model itself"}`;
  const room = Number(data.peak_bytes) / Number(data.capacity_bytes);
  return [
    { bytes: data.peak_bytes, label: "peak live memory", text: size(data.peak_bytes), remark: `${reached}${of}` },
    { bytes: data.capacity_bytes, label: "peak as a share of the chip's memory", text: percent(room), remark: `${size(data.capacity_bytes)}, ${data.chip}` },
  ].filter(({ bytes }) => bytes !== null);
}

/** @type {(data: Memory) => string[]} */
function remarks(data) {
  const drawn = data.points.at.length - (data.peak === null ? 0 : 1);
  const isWhole = drawn === data.operators;
  return [
    data.source === "fake" ? "Nothing was allocated. The chart shows the sizes that the tensors would have." : "The chart shows the bytes of tensors, without the internal workspaces of kernels.",
    isWhole ? "" : `The chart shows ${exact(drawn)} of ${exact(data.operators)} operators: the highest and the lowest point of each of many equal intervals.`,
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
  return plainTable("by module", [...texts("created or owned by module"), ...amounts("bytes", "share")], left ? [...rows, [`${left} more`, bytesOf(bytesLeft), valued(bytesLeft / total, percent)]] : rows);
}

/** @type {(data: Memory, openModule: (name: string) => void) => HTMLElement} */
function largest(data, openModule) {
  const { category, operator, module, phase, number, each_bytes: each } = data.alive;
  return plainTable("largest storages", [...texts("category", "module", "created by"), ...amounts("size of each", "number", "share")], each.map((bytes, row) => [
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
