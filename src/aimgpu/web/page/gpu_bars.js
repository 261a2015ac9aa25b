// Each GPU as a bar: one segment per model with weights, KV cache and overhead, others' processes, and what is free.

import { h } from "./dom.js";
import { bytes, gib, hue, plural } from "./format.js";
import { changed } from "./store.js";
import { button } from "./ui.js";

const MOST_IN_LEGEND = 10; // two lines at 1280 pixels: the table of models below stays in sight
const unfolded = new Set(); // GPUs whose legend is shown whole

const TERM_NAMES = { weights: "weights", kv_cache: "KV cache", overhead: "engine and activations", reserve: "reserve" };

const CUT_BELOW = 0.3; // where less of a GPU is taken, what is free is cut short: three small models on a large GPU would be slivers
const TAKEN_WHEN_CUT = 0.62;

/** How much of its fullest partition is taken. */
export function takenPart(gpu) {
  return Math.max(...gpu.partitions.map((part) => taken(part) / part.memory_bytes), 0);
}

function taken(part) {
  return part.shares.reduce((all, one) => all + one.memory_bytes, part.foreign_bytes);
}

/** `most`: of what `takenPart` returns, where two bars are to have one scale. */
export function gpuBar(gpu, { onModel, most = takenPart(gpu) } = {}) {
  const cut = most > 0 && most < CUT_BELOW;
  const shown = cut ? most / TAKEN_WHEN_CUT : 1; // of each partition
  return h(
    "div",
    { class: `bar ${gpu.partitions.length > 1 ? "split" : ""}`, role: "group", "aria-label": `Memory of gpu${gpu.index}` },
    gpu.partitions.map((part) => partition(part, gpu, { onModel, cut, shown })),
  );
}

function partition(part, gpu, { onModel, cut, shown }) {
  const left = part.memory_bytes - taken(part);
  const free = freeText(part, left);
  const title = `${part.id.split("/").pop()}: ${bytes(part.memory_bytes)}${part.compute_units ? `, ${part.compute_units} compute units` : ""}`;
  const grow = (size) => ({ flex: `${(1000 * Math.max(size, 0)) / part.memory_bytes} 1 0` });
  return h(
    "div",
    { key: part.id, class: "part", style: { flex: `${(1000 * part.memory_bytes) / gpu.memory_bytes} 1 0`, "--n": part.shares.length + (part.foreign_bytes ? 1 : 0) }, title },
    part.shares.map((share) => segment(share, grow(share.memory_bytes), onModel)),
    part.foreign_bytes > 0 &&
      h("i", { key: "foreign", class: "foreign", role: "img", style: grow(part.foreign_bytes), title: `Processes that are not ours: ${bytes(part.foreign_bytes)}`, "aria-label": `Other processes ${bytes(part.foreign_bytes)}` }, h("span", {}, "other")),
    left > 0 && h("i", { key: "free", class: `free ${cut ? "cut" : ""}`, role: "img", style: grow(shown * part.memory_bytes - taken(part)), title: cut ? `${free}, not drawn to scale` : null, "aria-label": `${title}, ${free}${cut ? ", not drawn to scale" : ""}` }, gpu.partitions.length > 1 ? null : free),
  );
}

/** As it stands above the bar. What is left of a partition that one model has alone is not free. */
function freeText(part, left) {
  if (part.free_bytes === 0 && left > 0) return "not for others";
  const shares = part.shares.reduce((all, one) => all + one.memory_bytes, 0);
  return `${gib(Math.max(0, part.memory_bytes - shares - part.foreign_bytes))} GiB free`;
}

function segment(one, style, onModel) {
  const measured = one.measured_bytes === null || one.measured_bytes === undefined ? null : Math.min(1, one.measured_bytes / one.memory_bytes);
  const terms = (one.terms ?? []).filter((term) => term.memory_bytes > 0);
  const described = [
    `${one.model}: ${bytes(one.memory_bytes, { up: true })} granted`,
    measured === null ? null : `${bytes(one.measured_bytes, { up: true })} measured`,
    ...terms.map((term) => `${TERM_NAMES[term.name] ?? term.name} ${bytes(term.memory_bytes, { up: term.name !== "reserve" })}`),
  ].filter(Boolean);
  return h(
    "i",
    {
      key: one.instance,
      class: `share ${one.state ?? ""} ${one.fresh ? "fresh" : ""} ${measured !== null && one.measured_bytes > one.memory_bytes ? "over" : ""}`,
      role: onModel ? "button" : "img",
      tabindex: onModel ? "0" : null,
      style: { ...style, "--c": hue(one.model) },
      title: described.join(", "),
      "aria-label": described.join(", "),
      onclick: onModel && (() => onModel(one.model)),
      onkeydown: onModel && ((event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onModel(one.model); } }),
    },
    terms.map((term) => h("u", { key: term.name, class: `term ${term.name}`, style: { width: `${(term.memory_bytes / one.memory_bytes) * 100}%` } })),
    measured !== null && h("u", { key: "measured", class: "measured", style: { width: `${measured * 100}%` } }),
    h("span", { key: "name" }, one.model, h("em", {}, bytes(one.memory_bytes, { up: true }))),
  );
}

/** The largest first where not all are shown; the others on demand. */
export function gpuLegend(gpu) {
  const shares = gpu.partitions.flatMap((part) => part.shares);
  const whole = unfolded.has(gpu.id) || shares.length + gpu.others.length <= MOST_IN_LEGEND + 1;
  const shown = whole ? shares : [...shares].sort((a, b) => b.memory_bytes - a.memory_bytes).slice(0, MOST_IN_LEGEND);
  const others = whole ? gpu.others : gpu.others.slice(0, MOST_IN_LEGEND - shown.length);
  const left = shares.length + gpu.others.length - shown.length - others.length;
  return h(
    "div",
    { class: "legend" },
    shown.map((one) => h("span", { key: one.instance }, h("b", { style: { background: hue(one.model) } }), one.model, h("em", {}, legendText(one)))),
    gpu.reserved_bytes ? h("span", { key: "reserved" }, h("b", { class: "foreign" }), "kept by the driver, beside this bar", h("em", {}, bytes(gpu.reserved_bytes, { up: true }))) : null,
    others.map((one) => h("span", { key: `pid${one.pid}` }, h("b", { class: "foreign" }), `pid ${one.pid} ${one.name ?? ""}, not ours`, one.memory_bytes ? h("em", {}, bytes(one.memory_bytes, { up: true })) : null)),
    left || unfolded.has(gpu.id) ? button(left ? `+${left} more` : "fewer", () => fold(gpu.id), { key: "fold", class: "link", "aria-expanded": left ? "false" : "true", "aria-label": `${left ? `+${left} more` : "fewer"} in the legend of gpu${gpu.index}` }) : null,
  );
}

function fold(id) {
  if (!unfolded.delete(id)) unfolded.add(id);
  changed();
}

function legendText(one) {
  const terms = (one.terms ?? []).filter((term) => term.memory_bytes > 0 && (term.name === "weights" || term.name === "kv_cache"));
  const parts = terms.map((term) => `${term.name === "weights" ? "weights" : "KV"} ${bytes(term.memory_bytes, { up: true })}`);
  return parts.length ? `${parts.join(", ")} of ${bytes(one.memory_bytes, { up: true })}` : bytes(one.memory_bytes, { up: true });
}

export function gpuTitle(gpu) {
  const facts = [gpu.layout];
  if (gpu.partitions.length > 1) facts.push(plural(gpu.partitions.length, "partition"));
  if (gpu.compute_units) facts.push(`${gpu.compute_units} ${gpu.vendor === "amd" ? "CUs" : "SMs"}`);
  if (gpu.utilization_percent !== null && gpu.utilization_percent !== undefined) facts.push(`busy ${gpu.utilization_percent} %`);
  return facts.join(" · ");
}
