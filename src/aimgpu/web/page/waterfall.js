// The sizing waterfall: each term of a footprint begins where the one before ends.

import { h } from "./dom.js";
import { bytes } from "./format.js";

const NAMES = { weights: "Weights", kv_cache: "KV cache", activations: "Activations", graphs: "Graphs", engine: "Engine", context: "Context", startup: "Start-up" };

export function waterfall(footprint, granted = null, measured = null) {
  const top = Math.max(footprint.total_bytes, granted ?? 0, measured ?? 0, 1);
  let before = 0;
  const rows = footprint.terms.map((term) => {
    const row = { name: NAMES[term.name] ?? term.name, key: term.name, from: before, size: term.memory_bytes, note: `${term.formula}${term.exactness === "exact" ? "" : ` (${term.exactness})`}` };
    before += term.memory_bytes;
    return row;
  });
  rows.push({ name: "Total", key: "total", from: 0, size: footprint.total_bytes, note: footprint.exactness });
  if (granted) rows.push({ name: "Granted", key: "granted", from: 0, size: granted, note: "what the ledger charges" });
  if (measured !== null && measured !== undefined) rows.push({ name: "Measured", key: "measured", from: 0, size: measured, note: "what the device reports" });
  return h(
    "div",
    { class: "waterfall" },
    rows.map((row) =>
      h(
        "div",
        { key: row.key, class: `step ${row.key}`, title: row.note },
        h("span", {}, row.name),
        h("div", { class: "track" }, h("i", { style: { left: `${(row.from / top) * 100}%`, width: `${Math.max(0.4, (row.size / top) * 100)}%` } })),
        h("em", {}, bytes(row.size, { up: true })),
      ),
    ),
  );
}
