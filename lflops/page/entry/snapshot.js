// Entry of the page of a snapshot of CUDA's memory, which opens offline.

import { element } from "../lib/dom.js";
import { snapshot } from "../views/snapshot.js";
import { unpacked } from "../lib/unpack.js";

const root = /** @type {HTMLElement} */ (document.getElementById("root"));
const part = /** @type {HTMLElement} */ (document.getElementById("data"));
/** @type {State} */
const state = {};

unpacked(part).then((/** @type {Snapshot} */ data) => {
  const main = element("main", { class: "view", tabindex: 0, "aria-label": "memory" });
  root.replaceChildren(element("header", {}, element("div", { class: "bar" }, element("h1", {}, `lflops, memory of ${data.title}`))), main);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(width - main.clientWidth) <= 4) return;
    width = main.clientWidth;
    main.replaceChildren(snapshot(data, state));
  }).observe(main);
});
