// The file that opens offline: its windows are in the document, deflated. Of more than one each says what it is.

import { open } from "../shell/app.js";

const parts = [...document.querySelectorAll('script[type="text/plain"]')];

const source = {
  address: { read: () => location.hash.slice(1), write: (text) => history.replaceState(null, "", `#${text}`) },
  open: parts.length > 1 ? "compare" : undefined,
  async list() {
    return { windows: parts.map(({ dataset: { run = null, tag = null, step = null } }, at) => ({ run, tag, step, at })), problems: [] };
  },
  async read({ at }) {
    const bytes = Uint8Array.from(atob(parts[at].textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  },
};

open(source, document.getElementById("root"));
