// Parts of the page whose data are loaded when they are drawn.

import { element } from "./dom.js";
import { messageOf } from "./format.js";

/**
 * Fills a node as soon as its data are loaded, and until then shows that they are loading.
 *
 * The data are kept by the key, so a node for the same key is filled at once, for example after a change of the page's width.
 * @template {object} Key
 * @template Data
 * @param {HTMLElement} node
 * @param {WeakMap<Key, Promise<Data>>} kept
 * @param {Key} key
 * @param {() => Promise<Data>} load
 * @param {(data: Data) => HTMLElement[]} draw
 * @param {string} subject What cannot be shown after an error, such as "The run".
 */
export function fillWhenLoaded(node, kept, key, load, draw, subject) {
  const data = kept.get(key) ?? load();
  kept.set(key, data);
  node.append(element("p", { class: "message" }, "Loading…"));
  data.then(
    (found) => node.replaceChildren(...draw(found)),
    (error) => {
      kept.delete(key);
      node.replaceChildren(element("p", { class: "message" }, `${subject} cannot be shown: ${messageOf(error)}`));
    },
  );
}
