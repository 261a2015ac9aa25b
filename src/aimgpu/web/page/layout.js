// Change the layout of a GPU: what would stop and what would come back is shown before anything is done.

import { act } from "./actions.js";
import { api, apiLines } from "./api.js";
import { h } from "./dom.js";
import { bytes } from "./format.js";
import { cluster, named, state } from "./store.js";
import { announceOnce, button, drawLayers, field, moveByArrows, openDialog, problem } from "./ui.js";

export function openLayout(gpu, layout = gpu.layout) {
  const job = { gpu: gpu.id, index: gpu.index, layout, custom: "", plan: null, error: null, lines: null, reload: false };
  openDialog((close) => layoutView(job, close), { label: `Layout of gpu${gpu.index}`, wide: true });
  if (layout !== gpu.layout) planLayout(job);
}

async function planLayout(job) {
  const wanted = job.layout;
  job.error = job.plan = null;
  drawLayers();
  try {
    const plan = await api("POST", "/partition?dry_run=1", { device: job.gpu, layout: wanted });
    if (job.layout === wanted) {
      job.plan = plan;
      announceOnce(job, `${wanted}: ${effect(plan)}`);
    }
  } catch (error) {
    if (job.layout === wanted) job.error = error;
  }
  drawLayers();
}

function layoutView(job, close) {
  const gpu = state.gpus.find((one) => one.id === job.gpu);
  if (!gpu) return h("p", {}, "This GPU is gone.");
  const cannot = state.session.write ? null : state.session.reason ?? "Changes need a key.";
  const choose = (name) => {
    job.layout = name;
    planLayout(job);
  };
  const same = job.layout === gpu.layout;
  return [
    h("header", {}, h("h2", {}, `Layout of gpu${job.index}`), h("span", { class: "dim" }, `${gpu.name}, now ${gpu.layout}`), h("span", { class: "grow" }), button("✕", close, { class: "more", "aria-label": "Close" })),
    h(
      "div",
      { class: "layouts", role: "radiogroup", "aria-label": "Layouts", onkeydown: moveByArrows },
      gpu.layouts.map((one) =>
        button([h("b", {}, one.name), h("small", {}, one.partitions === 1 ? "one partition" : `${one.partitions} partitions${one.memory_bytes ? ` of ${bytes(one.memory_bytes)}` : ""}`), h("span", { class: "cells", "aria-hidden": "true" }, Array.from({ length: Math.min(one.partitions, 8) }, (_, at) => h("i", { key: at }))), one.reload && h("small", { class: "warn" }, "driver reload")], () => choose(one.name), { key: one.name, role: "radio", "aria-checked": job.layout === one.name ? "true" : "false", class: `layout ${job.layout === one.name ? "on" : ""}` }),
      ),
    ),
    gpu.flexible && field("Another set of MIG profiles", h("input", { type: "text", placeholder: "1g.18gb+3g.71gb", value: job.custom, onchange: (event) => { job.custom = event.target.value; if (job.custom) choose(job.custom); } })),
    job.lines ? h("ol", { class: "progress", "aria-live": "polite" }, job.lines.map((line, at) => h("li", { key: at }, line))) : preview(job, same),
    h("footer", {}, cannot && h("span", { class: "dim grow" }, cannot), button("Cancel", close, { class: "quiet" }), button("Change layout", () => change(job, close), { class: "primary", disabled: Boolean(cannot) || same || !job.plan || Boolean(job.lines) || (job.plan.needs_reload && !job.reload) })),
  ];
}

function preview(job, same) {
  if (same) return h("p", { class: "nodata" }, "Choose a layout to see what would stop, what would come back, and what would no longer fit.");
  if (job.error) return problem(job.error);
  if (!job.plan) return h("p", { class: "nodata" }, "Planning…");
  const { plan } = job;
  return h(
    "div",
    { class: "preview" },
    h("p", { class: `notice ${plan.does_not_fit.length ? "bad" : "ok"}` }, h("strong", {}, effect(plan)), h("small", {}, `${plan.before} → ${plan.after}${plan.devices.length > 1 ? `, on ${named(plan.devices.join(", "))}` : ""}`)),
    plan.stops.length ? h("ul", {}, plan.stops.map((one) => h("li", { key: one }, one, plan.returns.includes(one) ? h("em", { class: "ok" }, cluster() ? " fits again" : " comes back") : null))) : null,
    plan.does_not_fit.length ? h("ul", {}, plan.does_not_fit.map((one) => h("li", { key: one.instance, class: "bad" }, named(one.why.startsWith(one.instance) ? one.why : `${one.instance} would not fit: ${one.why}`)))) : null,
    plan.needs_reload && h("label", { class: "check warn" }, h("input", { type: "checkbox", checked: job.reload, onchange: (event) => { job.reload = event.target.checked; drawLayers(); } }), "Reload the driver: all GPU work of this vendor on this machine stops meanwhile"),
  );
}

function effect(plan) {
  const [stops, returns] = [plan.stops.length, plan.returns.length];
  if (!stops) return "Nothing that runs is disturbed.";
  if (cluster()) return `${stops} ${stops === 1 ? "pod is" : "pods are"} evicted from the node; ${returns} would fit again`;
  return `${stops} running ${stops === 1 ? "copy stops" : "copies stop"}; ${returns} come back`;
}

async function change(job, close) {
  job.lines = [];
  drawLayers();
  await act(cluster() ? `A PartitionPlan changes gpu${job.index} to ${job.layout}.` : `gpu${job.index} has layout ${job.layout}.`, async () => {
    let failed = null;
    try {
      await apiLines("/partition", { device: job.gpu, layout: job.layout, reload_driver: job.reload }, (event) => {
        if (event.event === "error") failed = Object.assign(new Error(event.message ?? event.text), { hint: event.page_hint ?? event.hint });
        if (event.text) job.lines = [...job.lines, named(event.text)].slice(-10);
        drawLayers();
      });
      if (failed) throw failed;
    } catch (error) {
      job.lines = null; // the form again
      drawLayers();
      throw error;
    }
    close();
  });
}
