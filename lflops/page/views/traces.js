// The traces of a window, to download, or to open in Perfetto. Only the tab in TensorBoard can reach them; a file shows their paths.

import { element } from "../lib/dom.js";

/** @type {(payload: Payload, source: Source) => HTMLElement | null} */
export function tracesOf(payload, source) {
  if (!payload.traces?.length) return null;
  const container = element("div", { class: "frame-of-trace" });
  return element(
    "div", { class: "traces" },
    element("h2", {}, payload.traces.length === 1 ? "Trace" : "Traces"),
    element("ul", {}, ...payload.traces.map((trace) => traceLine(trace, source, container))),
    container,
  );
}

/** @type {(trace: Trace, source: Source, container: HTMLElement) => HTMLElement} */
function traceLine({ rank, file, address }, source, container) {
  const { viewer } = source;
  const name = file.slice(file.lastIndexOf("/") + 1);
  const label = `rank ${rank}: `;
  if (!viewer) return element("li", {}, label, file);
  const show = async () => container.replaceChildren(await viewer(address ?? "", name));
  return element(
    "li", {}, label, element("a", { href: address ?? null, download: name }, name), " ",
    element("button", { type: "button", onclick: show }, "open in Perfetto"),
  );
}
