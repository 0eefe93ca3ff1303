// Which of the windows of a source is looked at, and the choice of one: by run, stage and step.

import { select } from "../lib/dom.js";

// What is wanted as far as it is there; of what is left the latest.
export function nearest(windows, wanted) {
  let left = windows;
  for (const key of ["run", "tag", "step"]) {
    const same = left.filter((window) => String(window[key]) === wanted[key]);
    if (same.length) left = same;
  }
  return left.at(-1);
}

// `pick` is called with what is chosen: a key and its value. `aim` is said to a screen reader where this is not the only choice of a window.
export function windowChoices(windows, window, pick, aim = "") {
  const values = (key, among) => [...new Set(among.map((each) => String(each[key])))].map((value) => [value, brief(value)]);
  const ofRun = windows.filter(({ run }) => run === window.run);
  const ofTag = ofRun.filter(({ tag }) => tag === window.tag);
  return [["run", "run", windows], ["tag", "stage", ofRun], ["step", "step", ofTag]].map(
    ([key, label, among]) => select(label, values(key, among), String(window[key]), (value) => pick(key, value), `${aim}${label}`),
  );
}

export function isSameWindow(one, other) {
  return ["run", "tag", "step"].every((key) => String(one[key]) === String(other[key]));
}

// A window's tag says its stage, where nobody gave it another.
export function brief(value) {
  return value.replace(/^lflops\/(.+)\/profile$/, "$1");
}
