// Perfetto's page in a frame: it is asked for here and nowhere else, and the trace goes to it within the browser.

import { element } from "../lib/dom.js";

const PERFETTO = "https://ui.perfetto.dev";
const PATIENCE = 20000;

export async function perfetto(address, title) {
  let buffer;
  try {
    const response = await fetch(address);
    if (!response.ok) throw new Error(await response.text());
    buffer = await response.arrayBuffer();
  } catch (error) {
    return element("p", { class: "doubt", role: "note" }, `This trace cannot be shown: ${error.message}.`);
  }
  const said = element("p", { class: "remark", role: "status" }, `Waiting for ${PERFETTO}…`);
  const frame = element("iframe", { class: "perfetto", title: `Perfetto: ${title}`, src: PERFETTO });
  hand(frame, { buffer, title }, said);
  return element("div", {}, said, frame);
}

// It hears nothing before it answers, so it is asked until then.
function hand(frame, trace, said) {
  const asking = setInterval(() => frame.contentWindow?.postMessage("PING", PERFETTO), 50);
  const given = setTimeout(() => {
    stop();
    said.textContent = `${PERFETTO} does not answer: download the trace, and open it where that page can be reached.`;
  }, PATIENCE);
  const hear = ({ source, origin, data }) => {
    if (source !== frame.contentWindow || origin !== PERFETTO || data !== "PONG") return;
    stop();
    said.remove();
    frame.contentWindow.postMessage({ perfetto: trace }, PERFETTO, [trace.buffer]);
  };
  const stop = () => {
    clearInterval(asking);
    clearTimeout(given);
    window.removeEventListener("message", hear);
  };
  window.addEventListener("message", hear);
}
