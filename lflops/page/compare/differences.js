// Two windows compared, module by module: what lflops/analyze/diff.py finds in two profiles, found in what the page has of them. Work is
// exact, so whatever differs in it is told; a time is judged only where the work is the same. A test holds that both find the same.

import { reader } from "../table/module_columns.js";
import { isNews, judged, judgeOf, judgeOfSteps, timed, uncompared } from "./judging.js";
import { matched } from "./matching.js";

const TIMED = ["forward", "backward", "recompute"];
const PHASES_OF_WORK = [...TIMED, "optimizer", "other"];

// In the fields and the names of `lflops.diff`; each module has its `rows` in either window beside its names.
export function differences(before, after) {
  const phases = sharedPhases(before.compare.phases_ran, after.compare.phases_ran);
  const sides = [before, after].map((payload) => new Side(payload, phases));
  const withSide = (place, at) => (place ? { ...place, side: sides[at] } : null);
  const pairs = matched(before.modules, after.modules).map((places) => places.map(withSide));
  const judge = judgeOfAll(pairs);
  const [first, second] = [before.compare, after.compare];
  const both = (field) => changeOf(first[field], second[field]);
  return {
    facts: factChanges(first, second),
    whole: judge ? judge.whole : null,
    step: judged(judgeOfSteps(null, first.step?.[0], 1), measured(first.step), measured(second.step)),
    phases: phaseChanges(first, second, judge),
    mfu: both("mfu"), samples_per_second: both("samples_per_second"), tokens_per_second: both("tokens_per_second"),
    peak_bytes: both("peak_bytes"), modules: modulesOf(pairs, judge),
  };
}

export function ratioOf({ before, after }) {
  return after === null || before === null || Number(before) === 0 ? null : Number(after) / Number(before);
}

export function differs({ before, after }) {
  return before !== null && after !== null && before !== after;
}

// Of a module's figures: whether the work or the parameters do.
export function workDiffers({ macs, flops, bytes_moved, parameters }) {
  return [macs, flops, bytes_moved, parameters].some(differs);
}

// Its own time where that is slower or faster, else the inclusive one.
export function newsOf(module) {
  return isNews(module.own.time) ? module.own.time : module.inclusive.time;
}

// Seconds and MACs of a module in each phase that has times, of itself or with all below it.
export function byPhase(before, after, { rows }, isOwn) {
  const own = isOwn ? "own_" : "";
  return TIMED.map((phase) => {
    const of = (field) => changeOf(...[before, after].map(({ modules }, at) => {
      if (rows[at] === null) return null;
      const [seen, read] = [looked(rows[at], isOwn), reader(modules, `${phase}.${own}${field}`)];
      if (field === "macs") return exactSum(seen, [read]);
      return seen.some((row) => read(row) === null) ? null : seen.reduce((total, row) => total + read(row), 0);
    }));
    return { phase, seconds: of("seconds"), macs: of("macs") };
  });
}

// What a window's columns say of places in it, in the phases that are looked at.
class Side {
  constructor({ modules, compare }, phases) {
    const of = (table, phase, field) => [`${phase}.${field}`, `${phase}.own_${field}`].map((name) => reader(table, name));
    this.counted = compare.counted;
    this.names = modules.name;
    this.kind = reader(modules, "kind");
    this.peak = reader(modules, "peak_bytes");
    this.parameters = ["parameters", "own_parameters"].map((name) => reader(modules, name));
    this.works = phases.map((phase) => ({
      isTimed: TIMED.includes(phase),
      macs: of(modules, phase, "macs"), flops: of(modules, phase, "flops"), bytes_moved: of(modules, phase, "bytes_moved"),
      ...(TIMED.includes(phase)
        ? { seconds: of(modules, phase, "seconds"), error: of(compare.times, phase, "error"), calls: of(compare.times, phase, "calls") }
        : {}),
    }));
    this.timed = this.works.filter(({ isTimed }) => isTimed);
  }

  // A count of all phases, or of those that have times.
  work({ rows }, field, own, works = this.works) {
    if (!this.counted) return null;
    const reads = works.map((work) => work[field][own]);
    return exactSum(looked(rows, own), reads);
  }

  // Of the phases that ran.
  time({ rows }, own) {
    const parts = [];
    for (const row of looked(rows, own)) {
      for (const { seconds, error, calls } of this.timed) {
        if (seconds[own](row) !== null || calls[own](row)) parts.push([seconds[own](row), error[own](row)]);
      }
    }
    return timed(parts);
  }

  parametersOf({ rows }, own) {
    return exactSum(looked(rows, own), [this.parameters[own]]);
  }
}

// Of what is inclusive the outermost row has all; what is own is that of each. `own` is 0 or 1.
function looked(rows, own) {
  return own || rows.length === 1 ? rows : rows.slice(0, 1);
}

// What rows have in several columns, exactly: what a number cannot hold is a text of its digits, as in the columns. Null is unknown.
function exactSum(rows, reads) {
  let total = 0;
  for (const row of rows) for (const read of reads) total += typeof read(row) === "number" ? read(row) : NaN;
  if (Number.isSafeInteger(total)) return total;
  const counts = rows.flatMap((row) => reads.map((read) => read(row)));
  return counts.includes(null) ? null : String(counts.reduce((all, count) => all + BigInt(count), 0n));
}

function changeOf(before, after) {
  return { before: before ?? null, after: after ?? null };
}

function ofPair(pair, figure) {
  return changeOf(...pair.map((place) => (place ? figure(place.side, place) : null)));
}

// Whether MACs and FLOPs of each phase that has times are known to be the same.
function sameWork([one, other], own) {
  if (!one || !other || !one.side.counted || !other.side.counted) return false;
  const [ours, theirs] = [looked(one.rows, own), looked(other.rows, own)];
  return one.side.timed.every((work, at) => ["macs", "flops"].every(
    (field) => exactSum(ours, [work[field][own]]) === exactSum(theirs, [other.side.timed[at][field][own]]),
  ));
}

function timesOf(pair, own) {
  return pair.map((place) => (place ? place.side.time(place, own) : null));
}

function judgeOfAll(pairs) {
  const times = pairs.filter((pair) => sameWork(pair, 1)).map((pair) => timesOf(pair, 1));
  const known = times.filter(([one, other]) => one && other && one.seconds && other.seconds);
  const [root] = timesOf(pairs[0], 0);
  return judgeOf(known, root ? root.seconds : 0, 2 * known.length);
}

// From below upwards: of an inclusive time only what no module below explains is news.
function modulesOf(pairs, judge) {
  const explained = new Map();
  const lost = (time) => (isNews(time) && time.lost !== null ? time.lost : 0);
  const made = [];
  for (const pair of [...pairs].reverse()) {
    const [one, other] = pair;
    const own = figuresOf(pair, judge, 1, 0);
    const inside = lost(own.time) + (one ? one.below : []).reduce((total, child) => total + explained.get(child.rows[0]), 0);
    const inclusive = figuresOf(pair, judge, 0, inside);
    if (one) explained.set(one.rows[0], lost(inclusive.time) || inside);
    made.push({
      before: one ? one.side.names[one.rows[0]] : null, after: other ? other.side.names[other.rows[0]] : null, kind: (other ?? one).kind,
      own, inclusive, peak_bytes: ofPair(pair, (side, { rows }) => side.peak(rows[0])),
      rows: pair.map((place) => (place ? place.rows : null)),
    });
  }
  return made.reverse();
}

function figuresOf(pair, judge, own, explained) {
  const [first, second] = timesOf(pair, own);
  const count = (field) => ofPair(pair, (side, place) => side.work(place, field, own));
  const time = judge && sameWork(pair, own)
    ? judged(judge, first, second, explained)
    : uncompared(first, second, ratioOf(ofPair(pair, (side, place) => side.work(place, "macs", own, side.timed))));
  return {
    macs: count("macs"), flops: count("flops"), bytes_moved: count("bytes_moved"),
    parameters: ofPair(pair, (side, place) => side.parametersOf(place, own)), time,
  };
}

function measured(time) {
  return time ? timed([time]) : null;
}

function phaseChanges(before, after, judge) {
  const names = [...new Set([...Object.keys(before.phases), ...Object.keys(after.phases)])];
  const ofSteps = judgeOfSteps(judge, before.step?.[0], names.length);
  return Object.fromEntries(names.map((name) => [name, judged(ofSteps, measured(before.phases[name]), measured(after.phases[name]))]));
}

// The phases of both. Of two windows that go backward, that only one of them recomputes is what changed.
function sharedPhases(before, after) {
  const found = new Set(before.filter((phase) => after.includes(phase)));
  if (found.has("backward")) found.add("recompute");
  return PHASES_OF_WORK.filter((phase) => found.has(phase));
}

function factChanges(before, after) {
  const found = { ...Object.fromEntries(Object.keys(before.facts).map((name) => [name, [before.facts[name], after.facts[name]]])) };
  const ran = ({ phases_ran: phases }) => phases.filter((phase) => phase !== "recompute").join(", ");
  if (before.counted && after.counted) found.phases = [ran(before), ran(after)];
  return Object.fromEntries(Object.entries(found).filter(([, [one, other]]) => one !== other));
}
