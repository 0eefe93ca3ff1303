// The only file that creates elements. Data of a run is text here, never markup.

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes `on…` are listeners, `style` is an object, null leaves an attribute out.
 * @param {(Node | string | number | null)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  fill(made, attributes, children);
  return made;
}

/**
 * A part of a drawing.
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes
 * @param {(Node | string | null)[]} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(made, attributes, children);
  return made;
}

/** @type {(made: HTMLElement | SVGElement, attributes: Record<string, any>, children: (Node | string | number | null)[]) => void} */
function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (typeof value === "boolean" && !name.startsWith("aria-")) made.toggleAttribute(name, value);
    else if (value !== null) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
}

// The width of a chart: that of the view without its margins.
/** @type {() => number} */
export function chartWidth() {
  return Math.min(Math.max((document.querySelector("main")?.clientWidth || 1256) - 36, 280), 2600);
}

/**
 * A choice of one of several values; `spoken` is its label for a screen reader.
 * @type {(label: string, options: string[][], chosen: string, onchange: (value: string) => void, spoken?: string) => HTMLLabelElement}
 */
export function select(label, options, chosen, onchange, spoken = label) {
  const list = element("select", { "aria-label": spoken, onchange: () => onchange(list.value) });
  for (const [value, text] of options) list.append(element("option", { value, selected: value === chosen }, text));
  return element("label", { class: "choice" }, label, list);
}
