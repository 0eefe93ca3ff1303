// Entry of the tab in TensorBoard: it requests its windows from the server, and again when TensorBoard has read new data.

import { open } from "../shell/app.js";
import { perfetto } from "../views/perfetto.js";

/** @type {(route: string, parameters?: Record<string, any>) => string} */
function addressOf(route, parameters = {}) {
  const address = new URL(`../${route}`, import.meta.url);
  for (const [name, value] of Object.entries(parameters)) address.searchParams.set(name, String(value));
  return address.href;
}

/** @type {(route: string, parameters?: Record<string, any>) => Promise<any>} */
async function request(route, parameters) {
  const response = await fetch(addressOf(route, parameters));
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// TensorBoard keeps what begins with p.<plugin> in its own address; the address of our frame is lost when the page is reloaded.
const STATE = /&p[.]lflops[.]state=([^&]*)/;
/** @type {Source["address"]} */
const address = {
  read: () => decodeURIComponent(window.parent.location.hash.match(STATE)?.[1] ?? ""),
  write: (text, isStep) => {
    const { history, location } = window.parent;
    const before = location.hash.replace(STATE, "");
    history[isStep ? "pushState" : "replaceState"](history.state, "", `${before}&p.lflops.state=${encodeURIComponent(text)}`);
  },
  link: () => window.parent.location.href,
  onback: (act) => window.parent.addEventListener("popstate", act),
};

/** @type {Source} */
const source = {
  address,
  hasTheme: true,
  runFilter() {
    const text = new URLSearchParams(window.parent.location.search).get("runFilter");
    try {
      return text ? new RegExp(text) : null;
    } catch {
      return null;
    }
  },
  list: () => request("windows"),
  async read({ run, tag, step }) {
    const payload = await request("window", { run, tag, step });
    const traces = payload.traces?.map((/** @type {Trace} */ trace, /** @type {number} */ index) => ({ ...trace, address: addressOf("trace", { run, tag, step, index }) }));
    return { ...payload, traces };
  },
  timeline: ({ run, tag, step }) => request("timeline", { run, tag, step }),
  run: ({ run, tag, step }) => request("run", { run, tag, step }),
  compare: (before, after) => request("compare", {
    before_run: before.run, before_tag: before.tag, before_step: before.step, run: after.run, tag: after.tag, step: after.step,
  }),
  viewer: perfetto,
};

// TensorBoard runs this once, in the plugin's frame.
export async function render() {
  document.documentElement.lang = "en";
  document.title = "LFLOPS";
  const sheet = document.createElement("link");
  sheet.rel = "stylesheet";
  sheet.href = new URL("../shell/style.css", import.meta.url).href;
  const isStyled = new Promise((resolve) => { sheet.onload = sheet.onerror = resolve; });
  document.head.append(sheet);
  await isStyled;
  followTheme();
  const root = document.createElement("div");
  root.id = "root";
  document.body.append(root);
  const { reload } = await open(source, root);
  onReload(reload);
}

// The frame has the same origin as TensorBoard, whose own choice of light or dark is a class of its body.
function followTheme() {
  const body = window.parent.document.body;
  const follow = () => document.documentElement.classList.toggle("host-dark", body.classList.contains("dark-mode"));
  document.documentElement.classList.add("hosted");
  follow();
  new MutationObserver(follow).observe(body, { attributeFilter: ["class"] });
}

// TensorBoard's messages to the frames of plugins, which it calls experimental: without them the user has to reload the page.
/** @type {(act: () => void) => void} */
function onReload(act) {
  const channel = new MessageChannel();
  window.parent.postMessage("experimental.bootstrap", "*", [channel.port2]);
  channel.port1.onmessage = ({ data }) => {
    const { type, id, isReply } = JSON.parse(data);
    if (isReply) return;
    if (type === "experimental.DataReloaded") act();
    channel.port1.postMessage(JSON.stringify({ type, id, payload: null, error: null, isReply: true }));
  };
}
