// Windows of a source: find one, and let the user choose one by run, stage and step.

import { select } from "./dom.js";

/** @typedef {"run" | "tag" | "step"} WindowKey */

/** @type {WindowKey[]} */
const KEYS = ["run", "tag", "step"];

// The window with the wanted run, tag and step, or the latest window that matches as many of them as possible.
/** @type {(windows: ProfileWindow[], wanted: State) => ProfileWindow | undefined} */
export function nearest(windows, wanted) {
  let left = windows;
  for (const key of KEYS) {
    const same = left.filter((window) => String(window[key]) === wanted[key]);
    if (same.length) left = same;
  }
  return left.at(-1);
}

// `pick` is called with the key that was chosen and its value. `aim` is a prefix of the labels for a screen reader.
/** @type {(windows: ProfileWindow[], window: ProfileWindow, pick: (key: WindowKey, value: string) => void, aim?: string) => HTMLElement[]} */
export function windowChoices(windows, window, pick, aim = "") {
  /** @type {(key: WindowKey, among: ProfileWindow[]) => string[][]} */
  const values = (key, among) => {
    const texts = new Map(among.map((each) => [String(each[key]), key === "step" ? windowStep(each, among) : brief(String(each[key]))]));
    return [...texts];
  };
  const ofRun = windows.filter(({ run }) => run === window.run);
  const ofTag = ofRun.filter(({ tag }) => tag === window.tag);
  /** @type {[WindowKey, string, ProfileWindow[]][]} */
  const choices = [["run", "run", windows], ["tag", "stage", ofRun], ["step", "step", ofTag]];
  // Runs without a name are one run, which is no choice.
  return choices.filter(([key]) => key !== "run" || windows.some(({ run }) => run)).map(([key, label, among]) => (
    select(label, values(key, among), String(window[key]), (value) => pick(key, value), `${aim}${label}`)
  ));
}

// The step of a window, as the whole page writes it: the step of the training run if the windows of its run and stage differ in it, otherwise
// the step at which it was logged.
/** @type {(window: ProfileWindow, windows: ProfileWindow[]) => string} */
export function windowStep(window, windows) {
  const among = windows.filter(({ run, tag }) => run === window.run && tag === window.tag);
  const steps = new Set(among.map(({ head }) => head?.step ?? null));
  return String(steps.has(null) || steps.size < among.length ? window.step : window.head?.step);
}

/** @type {(one: ProfileWindow, other: ProfileWindow) => boolean} */
export function isSameWindow(one, other) {
  return KEYS.every((key) => String(one[key]) === String(other[key]));
}

// The stage, if the tag is the usual tag.
/** @type {(value: string) => string} */
export function brief(value) {
  return value.replace(/^lflops\/(.+)\/profile$/, "$1");
}
