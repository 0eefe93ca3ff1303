// Links to rows of Modules.

// The state of Modules that shows a module, or with a star in its name all that it stands for.
/** @type {(name: string) => State} */
export function stateOfModules(name) {
  const parts = name.split(".");
  if (!parts.includes("*")) return { row: name, filter: "", regex: "", flat: "" };
  const pattern = parts.map((part) => (part === "*" ? "\\d+" : part.replace(/[^\w]/g, "\\$&"))).join("[.]");
  return { row: "", filter: `^${pattern}$`, regex: "true" };
}
