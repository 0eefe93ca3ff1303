// The columns that a table of modules can show: each reads a value of a row, of the module itself or with all below it.

import { greatestOf, meanOf, meanRate, ofOne } from "./fold.js";
import { count, duration, percent, rate, size } from "../lib/format.js";

/** @typedef {{ total: Reader, own: Reader }} Readers */

export const PHASES = ["forward", "backward", "recompute", "optimizer", "other"];

// A column of the payload is a list, or the one value that all modules have.
/** @type {(table: Columns, name: string) => Reader} */
export function reader(table, name) {
  const column = table[name] === undefined ? null : table[name];
  return Array.isArray(column) ? (row) => column[row] : () => column;
}

// A value that a module has only with all below it.
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
  return { total: reader(table, `${phase}.${field}`), own: reader(table, `${phase}.own_${field}`) };
}

// FLOPs without what a mask left out, as the roofline has them.
/** @type {(table: Columns, phase: string) => Readers} */
function executed(table, phase) {
  const [flops, masked] = ["flops", "masked_flops"].map((field) => ofPhase(table, phase, field));
  /** @type {(all: Reader, left: Reader) => Reader} */
  const less = (all, left) => (row) => (all(row) === null ? null : Number(all(row)) - Number(left(row)));
  return { total: less(flops.total, masked.total), own: less(flops.own, masked.own) };
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

// All columns in which any module has a value that is not 0.
/** @type {(table: Columns, rows: number[]) => ModuleColumn[]} */
export function columns(table, rows) {
  /** @type {(Partial<ModuleColumn> & Pick<ModuleColumn, "id" | "label" | "text" | "own" | "total">)[]} */
  const made = [
    { id: "calls", adds: true, label: "calls", text: count, ...plain(table, "calls") },
    { id: "parameters", adds: true, label: "parameters", text: count, total: reader(table, "parameters"), own: reader(table, "own_parameters") },
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
      { id: `${phase}.seconds`, adds: true, over: meanOf, label: `${phase} time`, text: duration, ...seconds },
      { id: `${phase}.device`, adds: true, over: meanOf, label: `${phase} kernels`, text: duration, ...ofAll(table, `${phase}.device_seconds`) },
      { id: `${phase}.rate`, over: meanRate, label: `${phase} FLOP/s`, text: rate, ...divided(macs, seconds, 2) },
      { id: `${phase}.intensity`, label: `${phase} FLOPs/byte`, text: count, ...divided(executed(table, phase), bytes) },
    );
  }
  return made.map((column) => ({ over: ofOne, adds: false, ...column })).filter((column) => rows.some((row) => Number(column.total(row) ?? 0) !== 0));
}

export const USUAL = [
  "parameters", "forward.macs", "forward.seconds", "forward.rate", "backward.macs", "backward.seconds", "optimizer.seconds", "peak_bytes",
];
