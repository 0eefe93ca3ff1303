// The traces of a window: each to be downloaded, or to be seen in Perfetto's own page. Only the tab can reach them, by the address that its
// source gives; without one it is said where they lie.

import { element } from "../lib/dom.js";

export function tracesOf(payload, source) {
  if (!payload.traces?.length) return null;
  const place = element("div", { class: "frame-of-trace" });
  return element(
    "div", { class: "traces" },
    element("h2", {}, payload.traces.length === 1 ? "Trace" : "Traces"),
    element("ul", {}, ...payload.traces.map((trace) => traceLine(trace, source, place))),
    place,
  );
}

function traceLine({ rank, file, address }, source, place) {
  const name = file.split("/").at(-1);
  const label = `rank ${rank}: `;
  if (!source.viewer) return element("li", {}, label, file);
  const show = async () => place.replaceChildren(await source.viewer(address, name));
  return element(
    "li", {}, label, element("a", { href: address, download: name }, name), " ",
    element("button", { type: "button", onclick: show }, "open in Perfetto"),
  );
}
