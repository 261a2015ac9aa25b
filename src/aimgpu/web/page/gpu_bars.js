// Each GPU as a bar: one segment per model with weights, KV cache and overhead, others' processes, and what is free.

import { h } from "./dom.js";
import { bytes, hue, plural } from "./format.js";

const TERM_NAMES = { weights: "weights", kv_cache: "KV cache", overhead: "engine and activations", reserve: "reserve" };

export function gpuBar(gpu, { onModel } = {}) {
  return h(
    "div",
    { class: `bar ${gpu.partitions.length > 1 ? "split" : ""}`, role: "list", "aria-label": `Memory of GPU ${gpu.index}` },
    gpu.partitions.map((part) => partition(part, gpu, onModel)),
  );
}

function partition(part, gpu, onModel) {
  const whole = gpu.memory_bytes;
  const width = (part.memory_bytes / Math.max(whole, part.memory_bytes)) * 100;
  const title = `${part.id.split("/").pop()}: ${bytes(part.memory_bytes)}${part.compute_units ? `, ${part.compute_units} compute units` : ""}`;
  return h(
    "div",
    { key: part.id, class: "part", style: { flex: `${width} 1 0` }, title },
    part.shares.map((share) => segment(share, part, onModel)),
    part.foreign_bytes > 0 &&
      h("i", { key: "foreign", class: "foreign", role: "listitem", style: { width: share(part.foreign_bytes, part) }, title: `Processes that are not ours: ${bytes(part.foreign_bytes)}`, "aria-label": `Other processes ${bytes(part.foreign_bytes)}` }, h("span", {}, "other")),
    !part.shares.length && part.foreign_bytes === 0 && h("span", { key: "free", class: "freeLabel", role: "listitem", "aria-label": `${title}, free` }, gpu.partitions.length > 1 ? "" : "free"),
  );
}

function share(size, part) {
  return `${Math.min(100, (size / part.memory_bytes) * 100)}%`;
}

function segment(one, part, onModel) {
  const measured = one.measured_bytes === null || one.measured_bytes === undefined ? null : Math.min(1, one.measured_bytes / one.memory_bytes);
  const terms = (one.terms ?? []).filter((term) => term.memory_bytes > 0);
  const described = [
    `${one.model}: ${bytes(one.memory_bytes)} granted`,
    measured === null ? null : `${bytes(one.measured_bytes)} measured`,
    ...terms.map((term) => `${TERM_NAMES[term.name] ?? term.name} ${bytes(term.memory_bytes, { up: term.name !== "reserve" })}`),
  ].filter(Boolean);
  return h(
    "i",
    {
      key: one.instance,
      class: `share ${one.state ?? ""} ${one.fresh ? "fresh" : ""} ${measured !== null && one.measured_bytes > one.memory_bytes ? "over" : ""}`,
      role: "listitem",
      tabindex: onModel ? "0" : null,
      style: { width: share(one.memory_bytes, part), "--c": hue(one.model) },
      title: described.join(" · "),
      "aria-label": described.join(", "),
      onclick: onModel && (() => onModel(one.model)),
      onkeydown: onModel && ((event) => event.key === "Enter" && onModel(one.model)),
    },
    terms.map((term) => h("u", { key: term.name, class: `term ${term.name}`, style: { width: `${(term.memory_bytes / one.memory_bytes) * 100}%` } })),
    measured !== null && h("u", { key: "measured", class: "measured", style: { width: `${measured * 100}%` } }),
    h("span", { key: "name" }, one.model, h("em", {}, bytes(one.memory_bytes))),
  );
}

export function gpuLegend(gpu) {
  const shares = gpu.partitions.flatMap((part) => part.shares);
  return h(
    "div",
    { class: "legend" },
    shares.map((one) => h("span", { key: one.instance }, h("b", { style: { background: hue(one.model) } }), one.model, h("em", {}, legendText(one)))),
    gpu.reserved_bytes ? h("span", { key: "reserved" }, h("b", { class: "foreign" }), "kept by the driver, beside this bar", h("em", {}, bytes(gpu.reserved_bytes, { up: true }))) : null,
    gpu.others.map((one) => h("span", { key: `pid${one.pid}` }, h("b", { class: "foreign" }), `pid ${one.pid} ${one.name ?? ""}, not ours`, one.memory_bytes ? h("em", {}, bytes(one.memory_bytes)) : null)),
  );
}

function legendText(one) {
  const terms = (one.terms ?? []).filter((term) => term.memory_bytes > 0 && (term.name === "weights" || term.name === "kv_cache"));
  const parts = terms.map((term) => `${term.name === "weights" ? "weights" : "KV"} ${bytes(term.memory_bytes, { up: true })}`);
  return parts.length ? `${parts.join(", ")} of ${bytes(one.memory_bytes)}` : bytes(one.memory_bytes);
}

export function gpuTitle(gpu) {
  const facts = [gpu.layout];
  if (gpu.partitions.length > 1) facts.push(plural(gpu.partitions.length, "partition"));
  if (gpu.compute_units) facts.push(`${gpu.compute_units} ${gpu.vendor === "amd" ? "CUs" : "SMs"}`);
  if (gpu.utilization_percent !== null && gpu.utilization_percent !== undefined) facts.push(`busy ${gpu.utilization_percent} %`);
  return facts.join(" · ");
}
