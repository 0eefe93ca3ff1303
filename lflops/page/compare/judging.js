// Is a change of a time news? The rule of lflops/analyze/judging.py, which derives it. A test holds that both say the same.

const LEAST_CHANGE = 0.03;
const LEAST_SHARE = 0.005;
const LARGE = 0.9;
const LEAST_MODULES = 3;
const LEAST_IN_COMMON = 1 / 3;
const CHANCE = 0.001;

export function isNews(time) {
  return time.verdict === "slower" || time.verdict === "faster";
}

// A time of several parts, [seconds, error in seconds] each, together: {seconds, error}, the error relative, and null where it is not
// known. Null where a part is unknown, or there is none.
export function timed(parts) {
  if (!parts.length || parts.some(([seconds]) => seconds === null)) return null;
  const sum = (at) => parts.reduce((total, part) => total + part[at], 0);
  const seconds = sum(0);
  return { seconds, error: seconds && parts.every(([, error]) => error !== null) ? sum(1) / seconds : null };
}

// Two times side by side, without a judgement; `macs` is the ratio of their MACs.
export function uncompared(before, after, macs = null) {
  const [first, second] = [before, after].map((time) => (time === null ? null : time.seconds));
  const ratio = !first || second === null ? null : second / first;
  return {
    before: first, after: second, ratio, per_mac: ratio !== null && macs && macs !== 1 ? ratio / macs : null,
    beyond: null, low: null, high: null, lost: null, verdict: null,
  };
}

// A judgement of two times, less the seconds of the change that are told of elsewhere.
export function judged(judge, before, after, explained = 0) {
  const given = uncompared(before, after);
  const known = errorOfRatio(before, after);
  if (!given.before || !given.after || !given.ratio || known === null) return given;
  const [whole, ofWhole] = judge.whole ? [judge.whole.ratio, judge.whole.error] : [1, 0];
  const least = given.before >= judge.large ? judge.least : judge.leastOfSmall;
  const [beyond, error] = [given.ratio / whole, Math.hypot(Math.max(known, least), ofWhole)];
  const lost = given.after - given.before * whole;
  const left = (lost - explained) / (given.before * whole);
  const matters = Math.abs(left) >= LEAST_CHANGE && Math.abs(left) * given.before >= LEAST_SHARE * judge.step;
  const isSure = left <= -1 || Math.abs(Math.log1p(left)) > judge.reach * error;
  return {
    ...given, beyond, low: beyond * Math.exp(-judge.reach * error), high: beyond * Math.exp(judge.reach * error), lost,
    verdict: !(matters && isSure) ? "same" : left > 0 ? "slower" : "faster",
  };
}

// What all judgements rest on, found from modules' times before and after; null where too few, or too little of the time, can be compared.
// `times` is how many will be judged, `step` the seconds of all modules before.
export function judgeOf(pairs, step, times) {
  const known = pairs
    .map(([before, after]) => (
      { seconds: before.seconds, logarithm: Math.log(after.seconds / before.seconds), error: errorOfRatio(before, after) }
    ))
    .filter(({ error }) => error !== null)
    .sort((a, b) => b.seconds - a.seconds || b.logarithm - a.logarithm || b.error - a.error);
  const all = known.reduce((total, { seconds }) => total + seconds, 0);
  if (known.length < LEAST_MODULES || all < LEAST_IN_COMMON * step) return null;
  let number = 0;
  for (let below = 0; number < known.length && below < LARGE * all; number += 1) below += known[number].seconds;
  number = Math.max(number, LEAST_MODULES);
  const small = known.slice(number);
  const [common, least] = typical(known.slice(0, number));
  const whole = { ratio: Math.exp(common), modules: number, error: (1.2533 * least) / Math.sqrt(number) };
  const leastOfSmall = small.length ? Math.max(least, typical(small)[1]) : least;
  return { whole, large: known[number - 1].seconds, least, leastOfSmall, reach: reachOf(times), step };
}

// A judge of what the steps' clock tells, with what the modules told.
export function judgeOfSteps(modules, step, times) {
  const none = { whole: null, large: 0, least: 0, leastOfSmall: 0 };
  return { ...(modules ?? none), reach: reachOf(times), step: step ?? 0 };
}

// The median of the logarithms, and the least error of any of them.
function typical(ratios) {
  const middle = middleOf(ratios.map(({ logarithm }) => logarithm));
  const scatter = 1.4826 * middleOf(ratios.map(({ logarithm }) => Math.abs(logarithm - middle)));
  return [middle, Math.max(scatter, middleOf(ratios.map(({ error }) => error)))];
}

function middleOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// How many errors an interval has to reach, if so many times are judged together: where a normal variable is beyond by chance, by Newton's
// method on its tail, which is a continued fraction out there.
function reachOf(times) {
  const chance = CHANCE / (2 * Math.max(times, 1));
  let at = Math.sqrt(-2 * Math.log(chance));
  for (let round = 0; round < 12; round += 1) {
    let fraction = at;
    for (let term = 60; term > 0; term -= 1) fraction = at + term / fraction;
    at += 1 / fraction - chance / (Math.exp((-at * at) / 2) / Math.sqrt(2 * Math.PI));
  }
  return at;
}

function errorOfRatio(before, after) {
  return before === null || after === null || before.error === null || after.error === null ? null : Math.hypot(before.error, after.error);
}
