// A step's live memory: its way through the operators as a drawing, and in tables what is alive at the peak.

import { course } from "./memory_chart.js";
import { element } from "../lib/dom.js";
import { exact, percent, size } from "../lib/format.js";
import { figure } from "./summary.js";

export const memory = { id: "memory", label: "Memory", draw: drawMemory };

// What the words mean, of which two can only be said when the step is over.
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
function drawMemory(payload, context) {
  const found = payload.memory;
  // Modules whose names differ in numbers alone are one line, which leads to all of them.
  const lead = (name) => context.go("modules", name.split(".").includes("*")
    ? { row: "", filter: `^${name.split(".").map((part) => (part === "*" ? "\\d+" : part.replace(/[^\w]/g, "\\$&"))).join("[.]")}$`, regex: "true" }
    : { row: name, filter: "", flat: "" });
  if (!found) {
    return element(
      "section", { class: "memory", "aria-label": "memory" },
      element("p", { class: "message" }, UNCOUNTED),
    );
  }
  return element(
    "section", { class: "memory", "aria-label": "memory" },
    element("div", { class: "figures" }, ...figures(found).map((each) => figure(each))),
    element("h2", {}, "Alive through the step"),
    course(found, { ...context, lead }),
    element("p", { class: "remark" }, remarks(found).join(" ")),
    element("h2", {}, "Alive at the peak"),
    element("div", { class: "beside" }, categories(found), holders(found, lead)),
    element("h2", {}, `The ${found.largest} largest storages at the peak`),
    largest(found, lead),
  );
}

function figures(found) {
  const of = found.rank === null ? "" : `, on rank ${found.rank}, of all ranks the most`;
  const at = found.peak === null ? null : (field) => found.points[field][found.peak];
  const reached = at === null ? "" : `in ${at("phase")}, ${at("operator")} of ${at("module") || "the root"}`;
  const room = Number(found.peak_bytes) / found.capacity_bytes;
  return [
    { bytes: found.peak_bytes, label: "peak live memory", text: size(found.peak_bytes), remark: `${reached}${of}` },
    { bytes: found.capacity_bytes, label: "of the chip's memory", text: percent(room), remark: `${size(found.capacity_bytes)}, ${found.chip}` },
  ].filter(({ bytes }) => bytes !== null);
}

function remarks(found) {
  const drawn = found.points.at.length - (found.peak === null ? 0 : 1);
  const isWhole = found.operators === null || drawn === found.operators;
  return [
    found.source === "fake" ? "Nothing was allocated: sizes are those that the tensors would have." : "Bytes of tensors; what kernels need for themselves is not among them.",
    isWhole ? "" : `Drawn are ${exact(drawn)} of ${exact(found.operators)} operators, the extremes of equal stretches.`,
    found.categories.length ? AS_DRAWN : "By category it is unknown: this profile was written by an earlier lflops.",
  ];
}

function categories(found) {
  const whole = Number(found.peak_bytes);
  return plainTable("by category", ["category", "bytes", "share"], found.by_category.map(([name, bytes]) => [
    element("span", { title: CATEGORIES[name] }, key(name), words(name)), amount(bytes), percent(Number(bytes) / whole),
  ]));
}

function holders(found, lead) {
  const whole = Number(found.peak_bytes);
  const { name, modules, bytes } = found.modules;
  const shown = Math.min(name.length, LISTED);
  const [more, rest] = found.more;
  const left = name.length - shown + more;
  const bytesLeft = bytes.slice(shown).reduce((sum, each) => sum + Number(each), Number(rest));
  const rows = name.slice(0, shown).map((text, row) => [
    leading(`${text || "(root)"}${modules[row] > 1 ? ` ×${modules[row]}` : ""}`, () => lead(text)),
    amount(bytes[row]), percent(Number(bytes[row]) / whole),
  ]);
  return plainTable("by module", ["made or owned by", "bytes", "share"], left ? [...rows, [`${left} more`, amount(bytesLeft), percent(bytesLeft / whole)]] : rows);
}

function largest(found, lead) {
  const { category, operator, module, phase, number, each_bytes: each } = found.alive;
  return plainTable("largest storages", ["category", "module", "made by", "each", "number", "share"], each.map((bytes, row) => [
    element("span", { title: CATEGORIES[category[row]] ?? null }, key(category[row]), words(category[row])),
    leading(module[row] || "(root)", () => lead(module[row])),
    operator[row] ? `${operator[row]} in ${phase[row]}` : "before the step",
    amount(bytes), exact(number[row]), percent((number[row] * Number(bytes)) / Number(found.peak_bytes)),
  ]));
}

// Numbers stand on the right.
function plainTable(label, head, rows) {
  const texts = new Set(["category", "module", "made by", "made or owned by"]);
  const cell = (tag) => (content, at) => element(
    tag, { class: texts.has(head[at]) ? null : "amount", "data-value": content.dataset?.value ?? null }, content,
  );
  return element(
    "table", { class: "plain-table", "aria-label": label },
    element("thead", {}, element("tr", {}, ...head.map(cell("th")))),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map(cell("td"))))),
  );
}

function amount(bytes) {
  return element("span", { title: `${exact(bytes)} bytes`, "data-value": bytes }, size(bytes));
}

function leading(text, act) {
  return element("button", { type: "button", class: "leading", onclick: act }, text);
}

function key(name) {
  return element("span", { class: "key", style: { background: `var(--memory-${CSS.escape(name)}, var(--rest))` } });
}

function words(name) {
  return name.replaceAll("_", " ");
}
