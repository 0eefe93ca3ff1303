// Which rank takes how much longer than the median one, in the places where that costs the most: a row a module and phase, a column a rank.

import { element } from "../lib/dom.js";
import { duration, exact, percent } from "../lib/format.js";

const ALONE = 32;
const COLUMNS = 64;
const WRITTEN = 16;
const BINNED = "A column of several ranks has the slowest of them in each place, so it looks slower than each of them is.";
const WAITING = "* Ranks wait for each other in these, nobody knows how long: there the one that is waited for looks fast.";
const LIMITS = [0.05, 0.1, 0.2, 0.5, 1];

// `order` has the ranks, those that stand together in a column beside each other; `lead` is called with a row's module.
export function heat(found, order, { rank, chooseRank, lead }) {
  const { module, phase, median, waiting, seconds_lost: lost } = found.places;
  const numbers = new Map(found.ranks.rank.map((each, place) => [each, place]));
  const columns = binned(order, Boolean(found.sortedBySlowness));
  const rows = module.map((_, row) => columns.map((ranks) => slowest(ranks, found.seconds[row], numbers)));
  const distances = rows.flatMap((cells, row) => cells.map((cell) => Math.abs(apart(cell.seconds, median[row]) ?? 0)));
  const most = distances.reduce((a, b) => Math.max(a, b), 0);
  const limit = LIMITS.find((each) => each >= most) ?? LIMITS.at(-1);

  function cell(ranks, row, { rank: worst, seconds }) {
    const deviation = apart(seconds, median[row]);
    const share = deviation === null ? 0 : Math.max(Math.min(deviation / limit, 1), -1);
    const against = deviation === null ? "" : `, ${withSign(deviation)} against the median rank`;
    const known = seconds === null ? "no time of it" : `${duration(seconds)}${against} (${exact(seconds)} s)`;
    const much = Math.round(100 * Math.abs(share));
    const ground = `color-mix(in oklab, var(--heat-${share < 0 ? "faster" : "slower"}) ${much}%, var(--heat-middle))`;
    const whose = ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} ranks, of which ${worst ?? ranks[0]} is the slowest`;
    const written = columns.length <= WRITTEN && deviation !== null ? withSign(deviation) : "";
    return element("td", {
      class: [seconds === null ? "unknown" : Math.abs(share) > 0.75 ? "strong" : "", ranks.includes(rank) ? "of-rank" : ""].join(" "),
      style: { background: seconds === null ? "" : ground },
      "data-value": seconds ?? "",
      title: `${module[row] || "(root)"} ${phase[row]}, ${whose}: ${known}`,
    }, written);
  }

  const head = columns.map((ranks) => element("th", { scope: "col", class: ranks.includes(rank) ? "of-rank" : "" }, element("button", {
    type: "button", class: "leading", "aria-pressed": ranks.includes(rank),
    title: ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks.join(", ")}`,
    onclick: () => chooseRank(ranks.includes(rank) ? null : ranks[0]),
  }, ranks.length === 1 ? String(ranks[0]) : `${ranks[0]} +${ranks.length - 1}`)));
  const body = rows.map((cells, row) => element(
    "tr", {},
    element(
      "th", { scope: "row", title: `${module[row] || "(root)"} ${phase[row]}` },
      element("button", { type: "button", class: "leading", onclick: () => lead(module[row]) }, module[row] || "(root)"), ` ${phase[row]}`,
    ),
    element("td", { class: "amount", title: `${exact(lost[row])} s`, "data-value": lost[row] }, `${duration(lost[row])}${waiting[row] === "unknown" ? " *" : ""}`),
    ...cells.map((each, at) => cell(columns[at], row, each)),
  ));
  return element(
    "div", {},
    legendOf(limit),
    element("div", { class: "heat-frame" }, element(
      "table", { class: columns.length > WRITTEN ? "heat narrow" : "heat", "aria-label": "ranks and modules" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "module and phase"), element("th", { scope: "col" }, "lost a step"), ...head)),
      element("tbody", {}, ...body),
    )),
    order.length > columns.length ? remark(BINNED) : null,
    waiting.includes("unknown") ? remark(WAITING) : null,
  );
}

// Each rank has a column as long as there is room; then the first of them have, if these are the slowest, and the others share.
function binned(order, isSlowestFirst) {
  if (order.length <= COLUMNS) return order.map((rank) => [rank]);
  const alone = isSlowestFirst ? ALONE : 0;
  const width = Math.ceil((order.length - alone) / (COLUMNS - alone));
  const columns = order.slice(0, alone).map((rank) => [rank]);
  for (let start = alone; start < order.length; start += width) columns.push(order.slice(start, start + width));
  return columns;
}

function slowest(ranks, seconds, numbers) {
  let found = { rank: null, seconds: null };
  for (const rank of ranks) {
    const told = seconds[numbers.get(rank)];
    if (told !== null && (found.seconds === null || told > found.seconds)) found = { rank, seconds: told };
  }
  return found;
}

function apart(seconds, median) {
  return seconds === null || !median ? null : seconds / median - 1;
}

function withSign(share) {
  const text = percent(share).replace("-", "−");
  return share > 0 && !text.startsWith("<") ? `+${text}` : text;
}

function remark(text) {
  return element("p", { class: "remark" }, text);
}

function legendOf(limit) {
  const most = percent(limit).replace(".0", "");
  return element(
    "p", { class: "heat-legend" }, `${most} faster than the median rank`,
    element("span", { class: "heat-scale", "aria-hidden": "true" }),
    `${most} slower${limit === LIMITS.at(-1) ? " or more" : ""}`,
  );
}
