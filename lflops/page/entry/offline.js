// Entry of the file that opens offline: its windows and their comparisons are in the document, deflated.

import { open } from "../shell/app.js";
import { unpacked } from "../lib/unpack.js";

/** @type {HTMLElement[]} */
const parts = [...document.querySelectorAll("script")].filter(({ id }) => id.startsWith("data"));

/** @type {Source} */
const source = {
  address: {
    read: () => location.hash.slice(1),
    write: (text, isStep) => history[isStep ? "pushState" : "replaceState"](null, "", `#${text}`),
    link: () => location.href,
    onback: (act) => addEventListener("popstate", act),
  },
  open: parts.some(({ dataset }) => "compare" in dataset) ? "compare" : undefined,
  async list() {
    const windows = parts.map(({ dataset: { run = null, tag = null, step = null, head = "null" } }, at) => ({ run, tag, step, at, head: JSON.parse(head) }));
    return { windows, problems: [] };
  },
  read: ({ at = 0 }) => unpacked(parts[at]),
  async run({ at = 0 }) {
    const [shown, ledger] = [`run${at || ""}`, "ledger"].map((id) => document.getElementById(id));
    if (shown === null) throw new Error("this file has no data about the whole run");
    return { ...await unpacked(shown), ledger: ledger === null ? null : await unpacked(ledger) };
  },
  async timeline({ at = 0 }) {
    const part = document.getElementById(`timeline${at || ""}`);
    if (part === null) throw new Error("this file has no timeline of the window");
    return unpacked(part);
  },
  async compare(before, after) {
    const part = document.getElementById(`comparison-${before.at}-${after.at}`);
    if (part === null) throw new Error("this file only has comparisons of a window with its neighbours and with the last window; lflops diff compares any two windows");
    return unpacked(part);
  },
};

open(source, /** @type {HTMLElement} */ (document.getElementById("root")));
