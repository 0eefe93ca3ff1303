// One rank's own figures among those of all ranks.

import { count, duration, size } from "../lib/format.js";

const OWN = [
  { field: "step", label: "step", text: duration, instead: ["step", "pass"] },
  { field: "data", label: "data wait", text: duration, instead: [] },
  { field: "cpu", label: "CPU time", text: duration, instead: ["CPU time"] },
  { field: "macs", label: "MACs", text: count, instead: ["MACs"], said: "forward and backward" },
  { field: "peak_bytes", label: "peak live memory", text: size, instead: ["peak live memory"] },
];

// The rank's own first, each beside what the others have; of the rest it is said that they are not its own.
export function figuresOfRank(all, table, rank) {
  const row = table.rank.indexOf(rank);
  const replaced = new Set(OWN.flatMap(({ instead }) => instead));
  const own = OWN.map(({ field, label, text, said }) => {
    const known = table[field].filter((value) => value !== null).sort((a, b) => Number(a) - Number(b));
    const [least, most] = [known[0], known.at(-1)].map((value) => text(value ?? null));
    const among = least === most ? "the same on all ranks that told" : `all ranks: ${least} to ${most}`;
    return { label: `${label}, rank ${rank}`, text: text(table[field][row]), remark: [said, among].filter(Boolean).join("; ") };
  });
  const rest = all.filter(({ label }) => !replaced.has(label));
  return [...own, ...rest.map((each) => ({ ...each, remark: ["of the whole run", each.remark].filter(Boolean).join(", ") }))];
}
