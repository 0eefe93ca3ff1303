// The columns that a table of modules can show. Each reads the self value or the inclusive value of a row.

import { greatestOf, meanOf, meanRate, ofOne, sumOf } from "./fold.js";
import { count, duration, ofPeak, percent, rate, size } from "../lib/format.js";

/** @typedef {{ total: Reader, own: Reader }} Readers */

export const PHASES = ["forward", "backward", "recompute", "optimizer", "other"];
const TIMED = ["forward", "backward", "recompute"]; // the phases in the total time of a module

// A column of the payload is a list, or a single value for all modules.
/** @type {(table: Columns, name: string) => Reader} */
export function reader(table, name) {
  const column = table[name] === undefined ? null : table[name];
  return Array.isArray(column) ? (row) => column[row] : () => column;
}

// A column with inclusive values only.
/** @type {(table: Columns, name: string) => Readers} */
function ofAll(table, name) {
  return { total: reader(table, name), own: () => null };
}

/** @type {(table: Columns, name: string) => Readers} */
function plain(table, name) {
  const read = reader(table, name);
  return { total: read, own: read };
}

/** @type {(table: Columns, phase: string, field: string) => Readers} */
function ofPhase(table, phase, field) {
  return { total: reader(table, `${phase}.${field}`), own: reader(table, `${phase}.self_${field}`) };
}

// FLOPs without the work that is skipped because of masks, as in the roofline.
/** @type {(table: Columns, phase: string) => Readers} */
function executed(table, phase) {
  const [flops, masked] = ["flops", "masked_flops"].map((field) => ofPhase(table, phase, field));
  /** @type {(all: Reader, left: Reader) => Reader} */
  const less = (all, left) => (row) => (all(row) === null ? null : Number(all(row)) - Number(left(row)));
  return { total: less(flops.total, masked.total), own: less(flops.own, masked.own) };
}

// The time of forward, backward and recompute together; unknown if one of them moved bytes and has no time.
/** @type {(table: Columns) => Readers} */
function allTime(table) {
  /** @type {(own: string) => Reader} */
  const made = (own) => {
    const parts = TIMED.map((phase) => [reader(table, `${phase}.${own}seconds`), reader(table, `${phase}.${own}bytes_moved`)]);
    return (row) => {
      let [sum, isKnown] = [0, false];
      for (const [seconds, bytes] of parts) {
        const time = seconds(row);
        if (time === null && Number(bytes(row) ?? 0) > 0) return null;
        if (time !== null) [sum, isKnown] = [sum + time, true];
      }
      return isKnown ? sum : null;
    };
  };
  return { total: made(""), own: made("self_") };
}

// Why a time, or a value that is computed from a time, is unknown: the phases that moved bytes and have no time. `id` is the id of a column.
/** @type {(table: Columns, id: string, isOwn: boolean) => Reader<string>} */
export function whyUntimed(table, id, isOwn) {
  const [phase] = id.split(".");
  const phases = PHASES.includes(phase) ? [phase] : TIMED;
  const compiled = reader(table, "compiled");
  const [seconds, bytes] = ["seconds", "bytes_moved"].map((field) => phases.map((each) => ofPhase(table, each, field)[isOwn ? "own" : "total"]));
  return (row) => {
    if (compiled(row)) return "the module runs inside a compiled module, which is timed as a whole";
    const ran = phases.filter((_, at) => Number(bytes[at](row) ?? 0) > 0);
    const untimed = phases.filter((each, at) => ran.includes(each) && seconds[at](row) === null);
    if (untimed.length) return `the module ran in ${untimed.join(" and in ")}, but its hooks measured no time there`;
    if (ran.length) return id.endsWith(".device") ? "no trace contains the module's kernels" : "the value is computed from a time or a peak that is unknown";
    return `${isOwn ? "the module itself ran no operator" : "the module ran no operator"} in ${phases.join(", ")}`;
  };
}

/** @type {(readers: Readers, change: (value: number, row: number, own: boolean) => number | null) => Readers} */
function changed({ total, own }, change) {
  /** @type {(read: Reader, isOwn: boolean) => Reader} */
  const by = (read, isOwn) => (row) => { const value = read(row); return value === null ? null : change(Number(value), row, isOwn); };
  return { total: by(total, false), own: by(own, true) };
}

/** @type {(above: Readers, below: Readers, factor?: number) => Readers} */
function divided(above, below, factor = 1) {
  /** @type {(upper: Reader, lower: Reader) => Reader} */
  const by = (upper, lower) => (row) => {
    const [over, under] = [upper(row), lower(row)];
    return over === null || under === null || Number(under) === 0 ? null : (factor * Number(over)) / Number(under);
  };
  return { total: by(above.total, below.total), own: by(above.own, below.own) };
}

// All columns with a value other than 0. `step` is the time of a step, `peak` the chip's FLOP/s for the dtype of the training run, and `highest` the
// highest peak of the dtypes of its matmuls.
/** @type {(table: Columns, rows: number[], run?: { step: number | null, peak: number | null, highest?: number | null }) => ModuleColumn[]} */
export function columns(table, rows, { step, peak, highest = null } = { step: null, peak: null }) {
  const time = allTime(table);
  const macs = Object.fromEntries(["forward", "backward"].map((phase) => [phase, ofPhase(table, phase, "macs")]));
  /** @type {(field: "own" | "total") => Reader} */
  const modelMacs = (field) => (row) => Number(macs.forward[field](row) ?? 0) + Number(macs.backward[field](row) ?? 0);
  const mfu = peak ? divided({ total: modelMacs("total"), own: modelMacs("own") }, time, 2 / peak) : changed(time, () => null);
  /** @type {(Partial<ModuleColumn> & Pick<ModuleColumn, "id" | "label" | "text" | "own" | "total">)[]} */
  const made = [
    { id: "time", adds: true, label: "total time", text: duration, ...time },
    { id: "share", adds: true, label: "share of the step", text: percent, ...changed(time, (seconds) => (step ? seconds / step : null)) },
    { id: "mfu", over: meanRate, label: "share of peak", text: ofPeak, ...mfu },
    { id: "calls", adds: true, label: "calls", text: count, ...plain(table, "calls") },
    { id: "parameters", adds: true, label: "parameters", text: count, total: reader(table, "parameters"), own: reader(table, "self_parameters") },
    { id: "trainable", adds: true, label: "trainable", text: count, ...ofAll(table, "trainable_parameters") },
    { id: "peak_bytes", over: greatestOf, label: "peak memory", text: size, ...ofAll(table, "peak_bytes") },
    { id: "rank_spread", over: greatestOf, label: "rank spread", text: percent, ...plain(table, "rank_spread") },
  ];
  for (const phase of PHASES) {
    const [macs, flops, bytes, seconds] = ["macs", "flops", "bytes_moved", "seconds"].map((field) => ofPhase(table, phase, field));
    made.push(
      { id: `${phase}.macs`, adds: true, label: `${phase} MACs`, text: count, ...macs },
      { id: `${phase}.flops`, adds: true, label: `${phase} FLOPs`, text: count, ...flops },
      { id: `${phase}.bytes`, adds: true, label: `${phase} bytes`, text: size, ...bytes },
      { id: `${phase}.comm`, adds: true, label: `${phase} communicated`, text: size, ...ofPhase(table, phase, "comm_bytes") },
      { id: `${phase}.seconds`, adds: true, label: `${phase} time`, text: duration, ...seconds },
      { id: `${phase}.device`, adds: true, label: `${phase} kernels`, text: duration, ...ofAll(table, `${phase}.device_seconds`) },
      { id: `${phase}.rate`, over: meanRate, label: `${phase} FLOP/s`, text: (value) => rate(value, highest), ...divided(macs, seconds, 2) },
      { id: `${phase}.intensity`, label: `${phase} FLOPs/byte`, text: count, ...divided(executed(table, phase), bytes) },
    );
  }
  return made.map((column) => ({ adds: false, over: column.adds ? sumOf : ofOne, ...column }))
    .filter((column) => rows.some((row) => Number(column.total(row) ?? 0) !== 0));
}

// The value of a row that stands for several modules: their sum, or their mean.
/** @type {(column: ModuleColumn, read: Reader, members: number[], isOfOne: boolean) => any} */
export function valueOf(column, read, members, isOfOne) {
  if (members.length === 1) return read(members[0]);
  if (!column.adds || !isOfOne) return column.over(read, members);
  const first = read(members[0]);
  return members.every((each) => read(each) === first) ? first : meanOf(read, members);
}

const USUAL = ["time", "share", "mfu", "forward.seconds", "backward.seconds", "forward.macs", "parameters", "peak_bytes"];
const LEAST_RECOMPUTED = 0.01; // of the total time; any fused attention recomputes a little

// The columns that are shown at first. With much recomputation, its time is one of them, so that the phases add up to the total time.
/** @type {(known: ModuleColumn[], root: number) => string[]} */
export function usualColumns(known, root) {
  const [time, recompute] = ["time", "recompute.seconds"].map((id) => Number(known.find((each) => each.id === id)?.total(root) ?? 0));
  return recompute >= LEAST_RECOMPUTED * time && recompute > 0 ? [...USUAL, "recompute.seconds"] : USUAL;
}
