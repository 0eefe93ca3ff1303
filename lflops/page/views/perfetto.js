// Perfetto in a frame. This is the only request to another site; the trace is passed to it within the browser.

import { element } from "../lib/dom.js";
import { messageOf } from "../lib/format.js";

const PERFETTO = "https://ui.perfetto.dev";
const PATIENCE = 20000;

/** @type {(address: string, title: string) => Promise<HTMLElement>} */
export async function perfetto(address, title) {
  let buffer;
  try {
    const response = await fetch(address);
    if (!response.ok) throw new Error(await response.text());
    buffer = await response.arrayBuffer();
  } catch (error) {
    return element("p", { class: "caveat", role: "note" }, `This trace cannot be shown: ${messageOf(error)}.`);
  }
  const status = element("p", { class: "remark", role: "status" }, `Waiting for ${PERFETTO}…`);
  const frame = element("iframe", { class: "perfetto", title: `Perfetto: ${title}`, src: PERFETTO });
  sendTrace(frame, { buffer, title }, status);
  return element("div", {}, status, frame);
}

// Perfetto receives nothing until it is loaded, so ping it until it answers.
/** @type {(frame: HTMLIFrameElement, trace: { buffer: ArrayBuffer, title: string }, status: HTMLElement) => void} */
function sendTrace(frame, trace, status) {
  const pings = setInterval(() => frame.contentWindow?.postMessage("PING", PERFETTO), 50);
  const timeout = setTimeout(() => {
    stop();
    status.textContent = `${PERFETTO} does not answer: download the trace, and open it on a computer that can reach this site.`;
  }, PATIENCE);
  /** @type {(event: MessageEvent) => void} */
  const onMessage = ({ source, origin, data }) => {
    if (source !== frame.contentWindow || origin !== PERFETTO || data !== "PONG") return;
    stop();
    status.remove();
    frame.contentWindow?.postMessage({ perfetto: trace }, PERFETTO, [trace.buffer]);
  };
  const stop = () => {
    clearInterval(pings);
    clearTimeout(timeout);
    window.removeEventListener("message", onMessage);
  };
  window.addEventListener("message", onMessage);
}
