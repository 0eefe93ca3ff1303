// What the view shows as files: every table as CSV, every chart as SVG and PNG, and the window as JSON. They are found in the document, so
// that a view has nothing to do for it; a grid that knows its values gives them itself.

import { csvOf, valuesOfGrid, valuesOfTable } from "../lib/csv.js";
import { element } from "../lib/dom.js";
import { gridOf } from "../table/virtual_table.js";
import { pngOf, standalone } from "./pictures.js";

// `current` gives what is shown: its payload, null where there is none, and its place in the document.
export function exportMenu(current) {
  const list = element("div", { class: "menu" });
  const menu = element("details", {
    class: "exports",
    ontoggle: () => { if (menu.open) list.replaceChildren(...offered(current()).map((offer) => menuItem(offer, menu))); },
    onkeydown: (event) => { if (event.key === "Escape") closeMenu(menu); },
  }, element("summary", {}, "export"), list);
  return menu;
}

function closeMenu(menu) {
  menu.open = false;
  menu.querySelector("summary").focus();
}

function menuItem({ label, name, make }, menu) {
  const button = element("button", {
    type: "button",
    onclick: async () => {
      try {
        saveFile(await make(), name);
        closeMenu(menu);
      } catch (error) {
        button.textContent = `${label}: ${error.message}`;
      }
    },
  }, label);
  return button;
}

function offered({ payload, place }) {
  if (payload === null) return [];
  const named = (label, kind) => `${`${payload.title} ${label}`.trim().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 120)}.${kind}`;
  const offer = (label, kind, make) => ({ label: `${label} as ${kind.toUpperCase()}`, name: named(label, kind), make });
  const csv = (values) => new Blob([csvOf(values)], { type: "text/csv" });
  const table = (node, values) => offer(node.getAttribute("aria-label") ?? "table", "csv", () => csv(values()));
  const grids = [...place.querySelectorAll(".grid")].map((node) => table(node, () => valuesOfGrid(gridOf(node).content)));
  const tables = [...place.querySelectorAll("table")].map((node) => table(node, () => valuesOfTable(node)));
  const charts = [...place.querySelectorAll("[role=img]")].filter((node) => node.getBoundingClientRect().width).flatMap((node) => {
    const label = node.getAttribute("aria-label").split(/[,;:.]/)[0];
    return [offer(label, "svg", () => new Blob([standalone(node)], { type: "image/svg+xml" })), offer(label, "png", () => pngOf(node))];
  });
  const json = () => new Blob([JSON.stringify(payload)], { type: "application/json" });
  const whole = { ...offer("this window", "json", json), name: named("", "json") };
  return [...grids, ...tables, ...charts, whole];
}

// The last file's address is kept until there is another: a browser may still be reading it.
let keptAddress = null;
function saveFile(blob, name) {
  if (keptAddress) URL.revokeObjectURL(keptAddress);
  keptAddress = URL.createObjectURL(blob);
  element("a", { href: keptAddress, download: name }).click();
}
