// The file that opens offline: its one window is in the document, deflated.

import { open } from "./app.js";

const source = {
  address: { read: () => location.hash.slice(1), write: (text) => history.replaceState(null, "", `#${text}`) },
  async list() {
    return { windows: [{ run: null, tag: null, step: null }], problems: [] };
  },
  async read() {
    const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  },
};

open(source, document.getElementById("root"));
