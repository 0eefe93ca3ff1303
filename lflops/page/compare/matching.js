// Which module of one window is which of another, across wrappers and renames: the rule of lflops/analyze/matching.py, which says why.
// A test holds that both find the same pairs.

import { reader } from "../table/module_columns.js";

const WRAPPERS = new Set(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"]);

// What makes two children of the same module the same, the surest first, and whether there have to be as many of them.
const MATCHES = [
  [(place) => JSON.stringify([place.label, place.work]), false],
  [(place) => (/^\p{Nd}+$/u.test(place.label) ? null : JSON.stringify([place.label, place.kind])), false],
  [(place) => place.work, false],
  [(place) => JSON.stringify([place.label, place.kind]), false],
  [(place) => place.build, true],
  [(place) => place.label, false],
];

// Pairs of places, {rows, below}: the rows of a payload's columns that are one module seen from outside, the outermost first. Where a
// module is in one of the two only, the other of its pair is null.
export function matched(before, after) {
  const [one, other] = [placeTree(before), placeTree(after)];
  lookInto(one, other);
  const numbers = new Map();
  numberPlaces(before, one, numbers);
  numberPlaces(after, other, numbers);
  const partners = new Map();
  pairUp(partners, one, other);
  const [left, right] = [one, other].map((root) => placesIn(root).filter((place) => !partners.has(place)));
  for (const [first, second] of alikePlaces(left, right, MATCHES[0][0], true)) {
    if (!partners.has(first) && !partners.has(second)) pairUp(partners, first, second);
  }
  return [
    ...placesIn(one).map((place) => [place, partners.get(place) ?? null]),
    ...placesIn(other).filter((place) => !partners.has(place)).map((place) => [null, place]),
  ];
}

// Itself and every place below it, in the model's order.
function placesIn(root) {
  const [found, waiting] = [[], [root]];
  while (waiting.length) {
    const place = waiting.pop();
    found.push(place);
    for (let at = place.below.length - 1; at >= 0; at -= 1) waiting.push(place.below[at]);
  }
  return found;
}

// Take two places for the same, and find out which of the places below them are.
function pairUp(partners, before, after) {
  const waiting = [[before, after]];
  const join = (one, other) => partners.set(one, other).set(other, one);
  join(before, after);
  while (waiting.length) {
    const [one, other] = waiting.pop();
    for (const [key, asMany] of MATCHES) {
      const [left, right] = [one, other].map(({ below }) => below.filter((place) => !partners.has(place)));
      if (!left.length || !right.length) break;
      for (const [first, second] of alikePlaces(left, right, key, asMany)) {
        join(first, second);
        waiting.push([first, second]);
      }
    }
  }
}

// The places with the same key, in order. With `asMany` both sides have to have as many, or who is who would be a guess.
function alikePlaces(left, right, key, asMany) {
  const [ours, theirs] = [byKey(left, key), byKey(right, key)];
  const pairs = [];
  for (const [each, places] of ours) {
    const others = theirs.get(each) ?? [];
    if (asMany && places.length !== others.length) continue;
    for (let at = 0; at < Math.min(places.length, others.length); at += 1) pairs.push([places[at], others[at]]);
  }
  return pairs;
}

function byKey(places, key) {
  const groups = new Map();
  for (const place of places) {
    const each = key(place);
    if (each === null) continue;
    if (groups.has(each)) groups.get(each).push(place);
    else groups.set(each, [place]);
  }
  return groups;
}

// The tree of a window's modules, without its wrappers.
function placeTree(table) {
  const kind = reader(table, "kind");
  const places = new Map(table.name.map((name, row) => [
    name, { rows: [row], label: name.slice(name.lastIndexOf(".") + 1), kind: kind(row).replace(/^FSDP/, ""), below: [], build: 0, work: 0 },
  ]));
  for (const [name, place] of places) if (name !== "") places.get(name.slice(0, Math.max(name.lastIndexOf("."), 0))).below.push(place);
  for (const place of places.values()) {
    while (place.below.length === 1 && WRAPPERS.has(place.below[0].label)) absorb(place, place.below[0]);
  }
  return places.get("");
}

// Take what is inside for the same as what is around it.
function absorb(place, inner) {
  place.rows = [...place.rows, ...inner.rows];
  place.kind = inner.kind;
  place.below = place.below.flatMap((child) => (child === inner ? inner.below : [child]));
}

// Where the whole of one window's model is an attribute of the other's, as in a LightningModule, make them the same place.
function lookInto(before, after) {
  let best = null;
  for (const [root, other] of [[before, after], [after, before]]) {
    for (const child of root.below) {
      if (!child.below.length) continue;
      const both = sharedPaths(child, other);
      if (best === null || both > best.both) best = { root, child, both };
    }
  }
  if (best === null || best.both <= sharedPaths(before, after)) return;
  const labels = new Set(best.root.below.filter((place) => place !== best.child).map(({ label }) => label));
  if (!best.child.below.some(({ label }) => labels.has(label))) absorb(best.root, best.child);
}

// How many paths lead from both to modules of the same class.
function sharedPaths(one, other) {
  const waiting = [[one, other]];
  let found = 0;
  while (waiting.length) {
    const [left, right] = waiting.pop();
    const labels = new Map(right.below.map((place) => [place.label, place]));
    for (const place of left.below) {
      const partner = labels.get(place.label);
      if (partner === undefined) continue;
      found += Number(place.kind === partner.kind);
      waiting.push([place, partner]);
    }
  }
  return found;
}

// The same `build` for two places whose classes are the same, all the way down; the same `work` where parameters and forward's MACs are too.
function numberPlaces(table, root, numbers) {
  const [parameters, macs] = ["own_parameters", "forward.own_macs"].map((name) => reader(table, name));
  const of = (...key) => {
    const text = JSON.stringify(key);
    if (!numbers.has(text)) numbers.set(text, numbers.size);
    return numbers.get(text);
  };
  for (const place of placesIn(root).reverse()) {
    const figures = place.rows.map((row) => [parameters(row) ?? 0, macs(row) ?? 0]).filter(([first, second]) => first || second);
    place.build = of("build", place.kind, place.below.map(({ build }) => build));
    place.work = of("work", place.kind, figures, place.below.map(({ work }) => work));
  }
}
