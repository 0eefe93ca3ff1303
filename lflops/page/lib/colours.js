// The colour of a part of a step, the same in every bar, chart and legend. The table is `--part-…` in the style sheet.

/** @type {(name: string) => string} */
export function colourOfPart(name) {
  return `var(--part-${CSS.escape(name.replace(/[ _]/g, "-"))}, ${colourOfName(name)})`;
}

// The colour of a name that is in no table: the same in every run. Two names can have the same colour.
/** @type {(name: string) => string} */
export function colourOfName(name) {
  return `hsl(${hashOf(name)} 55% 72%)`;
}

/** @type {(name: string) => number} */
export function hashOf(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + (letter.codePointAt(0) ?? 0)) % 360;
  return sum;
}
