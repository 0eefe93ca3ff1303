// The export menu: every table of the view as CSV, every chart as SVG and PNG, and the window as JSON. It reads them from the document, so views
// need no code for it; a grid can provide exact values. An SVG includes the styles of the page, so it looks the same elsewhere. PNG is drawn from
// the SVG.

import { csvOf, valuesOfGrid, valuesOfTable } from "../lib/csv.js";
import { element, svg } from "../lib/dom.js";
import { messageOf } from "../lib/format.js";
import { gridOf } from "../table/virtual_table.js";

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline", "visibility", "display", "color", "paint-order",
];
const SHARP = 2; // pixels of a PNG for each pixel of the screen

// `current` returns the payload, or null if there is none, and the element of the view.
/** @typedef {{ payload: Payload | null, view: HTMLElement }} Current */
/** @typedef {{ label: string, name: string, make: () => Blob | Promise<Blob> }} Offer */
/** @type {(current: () => Current) => HTMLElement} */
export function exportMenu(current) {
  const list = element("div", { class: "menu" });
  const menu = element("details", {
    class: "exports",
    ontoggle: () => { if (menu.open) list.replaceChildren(...offered(current()).map((offer) => menuItem(offer, menu))); },
    onkeydown: (/** @type {KeyboardEvent} */ event) => { if (event.key === "Escape") closeMenu(menu); },
  }, element("summary", {}, "export"), list);
  return menu;
}

/** @type {(menu: HTMLDetailsElement) => void} */
function closeMenu(menu) {
  menu.open = false;
  menu.querySelector("summary")?.focus();
}

/** @type {(offer: Offer, menu: HTMLDetailsElement) => HTMLElement} */
function menuItem({ label, name, make }, menu) {
  const button = element("button", {
    type: "button",
    onclick: async () => {
      try {
        saveFile(await make(), name);
        closeMenu(menu);
      } catch (error) {
        button.textContent = `${label}: ${messageOf(error)}`;
      }
    },
  }, label);
  return button;
}

/** @type {(current: Current) => Offer[]} */
function offered({ payload, view }) {
  if (payload === null) return [];
  /** @type {(label: string, kind: string) => string} */
  const named = (label, kind) => `${`${payload.title} ${payload.head.when} ${label}`.trim().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 120)}.${kind}`;
  /** @type {(label: string, kind: string, make: () => Blob | Promise<Blob>) => Offer} */
  const offer = (label, kind, make) => ({ label: `${label} as ${kind.toUpperCase()}`, name: named(label, kind), make });
  /** @type {(values: Value[][]) => Blob} */
  const csv = (values) => new Blob([csvOf(values)], { type: "text/csv" });
  /** @type {(node: Element, values: () => Value[][]) => Offer} */
  const table = (node, values) => offer(node.getAttribute("aria-label") ?? "table", "csv", () => csv(values()));
  const grids = [...view.querySelectorAll(".grid")].map((node) => table(node, () => valuesOfGrid(/** @type {import("../table/virtual_table.js").Grid} */ (gridOf(node)).content)));
  const tables = [...view.querySelectorAll("table")].map((node) => table(node, () => valuesOfTable(node)));
  /** @type {(node: Element) => boolean} */
  const isChart = (node) => node.getBoundingClientRect().width > 0 && !node.parentElement?.closest("[data-chart]");
  const charts = [...view.querySelectorAll("[role=img], [data-chart]")].filter(isChart).flatMap((node) => {
    const label = (node.getAttribute("data-chart") ?? node.getAttribute("aria-label") ?? "").split(/[,;:.]/)[0];
    const chart = node.querySelector("svg") ?? node;
    return [offer(label, "svg", () => new Blob([standalone(chart)], { type: "image/svg+xml" })), offer(label, "png", () => pngOf(chart))];
  });
  const json = () => new Blob([JSON.stringify(payload)], { type: "application/json" });
  const window = { ...offer("this window", "json", json), name: named("", "json") };
  return [...grids, ...tables, ...charts, window];
}

// The address of the last file is kept until the next file, because a browser may still read it.
/** @type {string | null} */
let keptAddress = null;
/** @type {(blob: Blob, name: string) => void} */
function saveFile(blob, name) {
  if (keptAddress) URL.revokeObjectURL(keptAddress);
  keptAddress = URL.createObjectURL(blob);
  element("a", { href: keptAddress, download: name }).click();
}

// A chart as the text of an SVG file; a chart of HTML elements becomes rectangles.
/** @type {(chart: Element) => string} */
function standalone(chart) {
  const { width, height } = chart.getBoundingClientRect();
  const background = svg("rect", { width: "100%", height: "100%", style: { fill: getComputedStyle(document.body).backgroundColor } });
  const drawing = chart instanceof SVGElement ? styled(chart) : boxes(/** @type {HTMLElement} */ (chart));
  if (!drawing.hasAttribute("viewBox")) drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const file = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, background, drawing);
  drawing.setAttribute("width", String(width));
  drawing.setAttribute("height", String(height));
  return new XMLSerializer().serializeToString(file);
}

// A chart as PNG, drawn from an image with a data address, because the page may not load other images.
/** @type {(chart: Element) => Promise<Blob>} */
async function pngOf(chart) {
  const { width, height } = chart.getBoundingClientRect();
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(chart))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.ceil(SHARP * width), height: Math.ceil(SHARP * height) });
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  /** @type {Blob | null} */
  const blob = await new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
  if (blob === null) throw new Error("the chart is too large for a PNG");
  return blob;
}

/** @type {(chart: SVGElement) => SVGElement} */
function styled(chart) {
  const copy = /** @type {SVGElement} */ (chart.cloneNode(true));
  const originals = [chart, ...chart.querySelectorAll("*")];
  [copy, .../** @type {NodeListOf<SVGElement>} */ (copy.querySelectorAll("*"))].forEach((node, at) => {
    const style = getComputedStyle(originals[at]);
    for (const name of STYLES) node.style.setProperty(name, style.getPropertyValue(name));
  });
  return copy;
}

// Each HTML element as its background and its text, clipped at its edges.
/** @type {(chart: HTMLElement) => SVGElement} */
function boxes(chart) {
  const frame = chart.getBoundingClientRect();
  const drawing = svg("svg", {});
  for (const box of [chart, .../** @type {NodeListOf<HTMLElement>} */ (chart.querySelectorAll("*"))]) {
    const [{ left, top, width, height }, style] = [box.getBoundingClientRect(), getComputedStyle(box)];
    if (!width || !height) continue;
    const part = svg("svg", { x: left - frame.left, y: top - frame.top, width, height });
    const [striped] = /rgba?\([^)]*\)|color\([^)]*\)|oklab\([^)]*\)/.exec(style.backgroundImage) ?? [];
    part.append(svg("rect", { width, height, style: { fill: striped ?? style.backgroundColor } }));
    if (box.title) part.append(svg("title", {}, box.title));
    if (!box.childElementCount && box.textContent) {
      const baseline = parseFloat(style.paddingTop) + (parseFloat(style.lineHeight) + 0.7 * parseFloat(style.fontSize)) / 2;
      part.append(svg("text", {
        x: parseFloat(style.paddingLeft), y: baseline, style: { fill: style.color, fontFamily: style.fontFamily, fontSize: style.fontSize },
      }, box.textContent));
    }
    drawing.append(part);
  }
  return drawing;
}
