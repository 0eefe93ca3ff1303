// The time of each rank compared with the median rank: a row for each module and phase with large differences, a column for each rank.

import { element } from "../lib/dom.js";
import { duration, exact, percent, phaseLabel, signed } from "../lib/format.js";

const COLUMNS_OF_SLOWEST = 32;
const COLUMNS = 64;
const WRITTEN = 16;
const BINNED = "A column with several ranks shows the slowest of them in each row, so the column looks slower than any single rank.";
const WAITING = "* In these rows, ranks wait for each other. A rank with a long time waits for the straggler, so the straggler itself looks fast.";
const LIMITS = [0.05, 0.1, 0.2, 0.5, 1];

// `order` has the ranks in the order of the columns; `openModule` is called with a row's module.
/** @typedef {{ rank: number | null, chooseRank: (rank: number | null) => void, openModule: (name: string) => void }} HeatmapContext */
/** @type {(data: Ranks & { sortedBySlowness: boolean }, order: number[], context: HeatmapContext) => HTMLElement} */
export function rankHeatmap(data, order, { rank, chooseRank, openModule }) {
  const { module, phase, median, waits, spread } = data.places;
  /** @type {Map<number, number>} */
  const numbers = new Map(data.ranks.rank.map((each, position) => [each, position]));
  const columns = binned(order, Boolean(data.sortedBySlowness));
  const rows = module.map((_, row) => columns.map((ranks) => slowest(ranks, data.seconds[row], numbers)));
  const distances = rows.flatMap((cells, row) => cells.map((cell) => Math.abs(deviationOf(cell.seconds, median[row]) ?? 0)));
  const most = distances.reduce((a, b) => Math.max(a, b), 0);
  const limit = LIMITS.find((each) => each >= most) ?? LIMITS[LIMITS.length - 1];

  /** @type {(ranks: number[]) => boolean} */
  const hasRank = (ranks) => rank !== null && ranks.includes(rank);

  /** @type {(ranks: number[], row: number, slowest: { rank: number | null, seconds: number | null }) => HTMLElement} */
  function cell(ranks, row, { rank: worst, seconds }) {
    const deviation = deviationOf(seconds, median[row]);
    const share = deviation === null ? 0 : Math.max(Math.min(deviation / limit, 1), -1);
    const against = deviation === null ? "" : `, ${withSign(deviation)} compared with the median rank`;
    const known = seconds === null ? "no time reported" : `${duration(seconds)}${against} (${exact(seconds)} s)`;
    const much = Math.round(100 * Math.abs(share));
    const ground = `color-mix(in oklab, var(--heat-${share < 0 ? "faster" : "slower"}) ${much}%, var(--heat-middle))`;
    const whose = ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} ranks, the slowest is rank ${worst ?? ranks[0]}`;
    const written = columns.length <= WRITTEN && deviation !== null ? withSign(deviation) : "";
    return element("td", {
      class: [seconds === null ? "unknown" : Math.abs(share) > 0.75 ? "strong" : "", hasRank(ranks) ? "of-rank" : ""].join(" "),
      style: { background: seconds === null ? "" : ground },
      "data-value": seconds ?? "",
      title: `${module[row] || "(model)"} ${phaseLabel(phase[row])}, ${whose}: ${known}`,
    }, written);
  }

  const head = columns.map((ranks) => element("th", { scope: "col", class: hasRank(ranks) ? "of-rank" : "" }, element("button", {
    type: "button", class: "leading", "aria-pressed": hasRank(ranks),
    title: ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks.join(", ")}`,
    onclick: () => chooseRank(hasRank(ranks) ? null : ranks[0]),
  }, ranks.length === 1 ? String(ranks[0]) : `${ranks[0]} +${ranks.length - 1}`)));
  const body = rows.map((cells, row) => element(
    "tr", {},
    element(
      "th", { scope: "row", title: `${module[row] || "(model)"} ${phaseLabel(phase[row])}` },
      element("button", { type: "button", class: "leading", onclick: () => openModule(module[row]) }, module[row] || "(model)"), ` ${phaseLabel(phase[row])}`,
    ),
    element("td", { class: "amount", title: `${exact(spread[row])} s`, "data-value": spread[row] }, `${duration(spread[row])}${waits[row] ? " *" : ""}`),
    ...cells.map((each, at) => cell(columns[at], row, each)),
  ));
  return element(
    "div", {},
    legendOf(limit),
    element("div", { class: "heat-frame" }, element(
      "table", { class: columns.length > WRITTEN ? "heat narrow" : "heat", "aria-label": "ranks and modules" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "module and phase"), element("th", { scope: "col" }, "slowest − median"), ...head)),
      element("tbody", {}, ...body),
    )),
    order.length > columns.length ? remark(BINNED) : null,
    waits.includes(true) ? remark(WAITING) : null,
  );
}

// A column for each rank if there is room. Otherwise only the slowest ranks have their own column, and the others share columns.
/** @type {(order: number[], isSlowestFirst: boolean) => number[][]} */
function binned(order, isSlowestFirst) {
  if (order.length <= COLUMNS) return order.map((rank) => [rank]);
  const single = isSlowestFirst ? COLUMNS_OF_SLOWEST : 0;
  const width = Math.ceil((order.length - single) / (COLUMNS - single));
  const columns = order.slice(0, single).map((rank) => [rank]);
  for (let start = single; start < order.length; start += width) columns.push(order.slice(start, start + width));
  return columns;
}

/** @type {(ranks: number[], seconds: (number | null)[], numbers: Map<number, number>) => { rank: number | null, seconds: number | null }} */
function slowest(ranks, seconds, numbers) {
  /** @type {{ rank: number | null, seconds: number | null }} */
  let slowestOne = { rank: null, seconds: null };
  for (const rank of ranks) {
    const time = seconds[numbers.get(rank) ?? -1] ?? null;
    if (time !== null && (slowestOne.seconds === null || time > slowestOne.seconds)) slowestOne = { rank, seconds: time };
  }
  return slowestOne;
}

/** @type {(seconds: number | null, median: number) => number | null} */
function deviationOf(seconds, median) {
  return seconds === null || !median ? null : seconds / median - 1;
}

/** @type {(share: number) => string} */
function withSign(share) {
  return signed(1 + share).replace("-", "−");
}

/** @type {(text: string) => HTMLElement} */
function remark(text) {
  return element("p", { class: "remark" }, text);
}

/** @type {(limit: number) => HTMLElement} */
function legendOf(limit) {
  const most = percent(limit).replace(".0", "");
  return element(
    "p", { class: "heat-legend" }, `${most} faster than the median rank`,
    element("span", { class: "heat-scale", "aria-hidden": "true" }),
    `${most} slower${limit === LIMITS[LIMITS.length - 1] ? " or more" : ""}`,
  );
}
