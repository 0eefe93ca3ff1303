// Entry of the page of a run's ledger, which opens offline.

import { element } from "../lib/dom.js";
import { drawnRun } from "../views/run.js";
import { unpacked } from "../lib/unpack.js";

const root = /** @type {HTMLElement} */ (document.getElementById("root"));
const part = /** @type {HTMLElement} */ (document.getElementById("data"));

unpacked(part).then((/** @type {RunShown} */ data) => {
  const main = element("main", { class: "view", tabindex: 0, "aria-label": "run" });
  root.replaceChildren(element("header", {}, element("div", { class: "bar" }, element("h1", {}, data.screen.header.slice(0, 2).join(", ")))), main);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(width - main.clientWidth) <= 4) return;
    width = main.clientWidth;
    main.replaceChildren(element("section", { class: "run", "aria-label": "run in time" }, ...drawnRun(data)));
  }).observe(main);
});
