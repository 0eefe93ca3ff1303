// The only place where the document is written to. What comes from a run is text here, never markup.

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// A part of a drawing.
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (typeof value === "boolean" && !name.startsWith("aria-")) made.toggleAttribute(name, value);
    else if (value !== null) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function select(label, options, chosen, onchange, spoken = label) {
  const list = element("select", { "aria-label": spoken, onchange: () => onchange(list.value) });
  for (const [value, text] of options) list.append(element("option", { value, selected: value === chosen }, text));
  return element("label", { class: "choice" }, label, list);
}
