// Deploy a model: every change of the form is sized and placed at once, so that the answer is known before it is submitted.

import { act } from "./actions.js";
import { api, apiLines } from "./api.js";
import { h } from "./dom.js";
import { bytes, percent } from "./format.js";
import { changed, cluster, state } from "./store.js";
import { announceOnce, button, complain, drawLayers, field, openDialog, problem, say } from "./ui.js";
import { waterfall } from "./waterfall.js";

const KINDS = ["memory", "fraction", "partition", "whole"];
const PRECISIONS = ["fp16", "bf16", "fp8", "int8", "int4"];
let catalogue = null;

export async function openDeploy(name = null, given = {}) {
  const base = name ? await readFields(name) : {};
  if (!base) return;
  const form = { name: "chat", model: "", engine: "", precision: "", context: "", concurrency: "", gpu: "auto", amount: "", isolation: "none", priority: "medium", keep: "always", ttft: "", tpot: "", replicas: "", image: "", namespace: cluster()?.models[name] ?? cluster()?.namespace ?? "", ...given };
  if (name) Object.assign(form, fromFields(name, base));
  else if (state.models.some((model) => model.name === form.name)) form.name = freeName(form.name);
  const before = name ? { ...form } : { gpu: "auto", amount: "" };
  if (name) Object.assign(form, given);
  const job = { form, base, before, check: null, error: null, checking: false, progress: null, editing: Boolean(name), timer: null, turn: 0 };
  openDialog((close) => view(job, close), { label: name ? `Edit ${name}` : "Deploy a model", wide: true, onClose: () => clearTimeout(job.timer) });
  if (!catalogue) {
    try {
      catalogue = await api("GET", "/catalogue");
    } catch {
      catalogue = { models: [], engines: [] };
    }
    drawLayers();
  }
  if (form.model) recheck(job, 0);
}

function freeName(wanted) {
  const names = new Set(state.models.map((model) => model.name));
  let count = 2;
  while (names.has(`${wanted}-${count}`)) count += 1;
  return `${wanted}-${count}`;
}

/** The stack entry of a model that is deployed; what the form does not show of it stays as it is. */
async function readFields(name) {
  try {
    return (await api("GET", `/models/${encodeURIComponent(name)}`)).fields;
  } catch (error) {
    complain(error);
    return null;
  }
}

function fromFields(name, base) {
  const gpu = typeof base.gpu === "object" ? base.gpu : {};
  const kind = KINDS.find((one) => one in gpu) ?? "auto";
  const text = (value) => (value === undefined ? "" : String(value));
  return { name, model: base.model, engine: text(base.engine), precision: text(base.precision), context: text(base.context), concurrency: text(base.concurrency), gpu: kind, amount: text(gpu[kind]), isolation: base.isolation ?? "none", priority: base.priority, keep: base.keep, ttft: text(base.slo?.ttft_p95), tpot: text(base.slo?.tpot_p95), replicas: text(base.replicas), image: text(base.image) };
}

function toFields({ form, base, before }) {
  const fields = { ...base, model: form.model.trim(), priority: form.priority, keep: form.keep.trim() || "always" };
  const put = (target, key, value) => {
    if (value === "") delete target[key];
    else target[key] = value;
  };
  for (const key of ["engine", "precision", "image"]) put(fields, key, form[key]);
  for (const key of ["context", "concurrency", "replicas"]) put(fields, key, form[key] === "" ? "" : Number(form[key]));
  if (form.gpu !== before.gpu || form.amount !== before.amount) {
    const amount = form.gpu === "whole" ? Number(form.amount) : String(form.amount);
    fields.gpu = form.gpu === "auto" || form.amount === "" ? "auto" : { [form.gpu]: amount };
  }
  put(fields, "isolation", form.isolation === "none" ? "" : form.isolation);
  const slo = { ...base.slo };
  put(slo, "ttft_p95", form.ttft.trim());
  put(slo, "tpot_p95", form.tpot.trim());
  put(fields, "slo", Object.keys(slo).length ? slo : "");
  return fields;
}

/** On a cluster, of two models of one name the younger is shown as namespace/name. */
function stackName({ form }) {
  return cluster() ? form.name.split("/").pop() : form.name;
}

function recheck(job, delay = 250) {
  clearTimeout(job.timer);
  job.timer = setTimeout(async () => {
    if (!job.form.model.trim()) {
      job.check = job.error = null;
      return drawLayers();
    }
    job.turn += 1;
    const turn = job.turn;
    job.checking = true;
    drawLayers();
    try {
      const found = await api("POST", "/size", { name: stackName(job), fields: toFields(job) });
      if (turn === job.turn) {
        [job.check, job.error] = [found, null];
        announceOnce(job, found.fits ? fitsText(found) : found.decision.summary ?? "It does not fit.");
      }
    } catch (error) {
      if (turn === job.turn) [job.check, job.error] = [null, error];
    }
    if (turn === job.turn) job.checking = false;
    return drawLayers();
  }, delay);
}

function fitsText(check) {
  return `Fits: needs ${bytes(check.footprint.total_bytes, { up: true })}`;
}

function view(job, close) {
  const title = job.editing ? `Edit ${job.form.name}` : "Deploy a model";
  const cannot = state.session.write ? null : state.session.reason ?? "Changes need a key.";
  return [
    h("header", {}, h("h2", {}, title), h("span", { class: "grow" }), button("✕", close, { class: "more", "aria-label": "Close" })),
    job.progress ? progressView(job) : h("div", { class: "deploy" }, formView(job), verdict(job)),
    !job.progress &&
      h(
        "footer",
        {},
        cannot && h("span", { class: "dim grow" }, cannot),
        button("Cancel", close, { class: "quiet" }),
        button(job.editing ? "Apply" : "Deploy", () => submit(job, close), { class: "primary", disabled: Boolean(cannot) || !job.form.model.trim() || Boolean(job.error) }),
      ),
    job.progress?.done && h("footer", {}, button("Close", close, { class: "primary" })),
  ];
}

function formView(job) {
  const { form } = job;
  const set = (key) => (event) => {
    form[key] = event.target.value;
    recheck(job);
    drawLayers();
  };
  const text = (key, props = {}) => h("input", { type: "text", value: form[key], oninput: set(key), autocomplete: "off", spellcheck: "false", ...props });
  const choice = (key, options) => h("select", { value: form[key], onchange: set(key) }, options.map(([value, label]) => h("option", { key: value, value }, label)));
  const engines = catalogue?.engines ?? [];
  return h(
    "form",
    { class: "fields", onsubmit: (event) => event.preventDefault() },
    field("Model", [text("model", { list: "catalogue", placeholder: "Qwen/Qwen2.5-7B-Instruct, a .gguf file, an Ollama tag", autofocus: true }), h("datalist", { id: "catalogue" }, (catalogue?.models ?? []).map((one) => h("option", { key: one.id, value: one.id })))], null, { class: "field wide" }),
    field("Name that callers use", text("name", { disabled: job.editing })),
    cluster() ? field("Namespace", text("namespace", { disabled: job.editing })) : null,
    field("Engine", choice("engine", [["", "best available"], ...engines.map((one) => [one.name, one.available ? one.name : `${one.name} (not here)`])])),
    field("Context, tokens", text("context", { inputmode: "numeric", placeholder: "the model's own" })),
    field("Requests at once", text("concurrency", { inputmode: "numeric", placeholder: "the engine's own" })),
    field("Precision", choice("precision", [["", "as published"], ...[...new Set([...PRECISIONS, ...(form.precision ? [form.precision] : [])])].map((one) => [one, one])])),
    field("Of the GPU", choice("gpu", [["auto", "as much as it needs"], ["memory", "memory"], ["fraction", "fraction"], ["partition", "a partition"], ["whole", "whole GPUs"]])),
    form.gpu !== "auto" ? field({ memory: "How much", fraction: "Which part", partition: "Which kind", whole: "How many" }[form.gpu], text("amount", { placeholder: { memory: "24GiB", fraction: "50%", partition: "cpx", whole: "1" }[form.gpu] })) : null,
    field("Priority", choice("priority", [["high", "high"], ["medium", "medium"], ["low", "low"]])),
    field("Isolation at least", choice("isolation", [["none", "none"], ["advisory", "advisory"], ["enforced", "enforced"], ["hardware", "hardware"]])),
    field("Keep loaded", text("keep", { placeholder: "always, or 10m" })),
    field("First token within (p95)", text("ttft", { placeholder: "500ms" })),
    field("Per token within (p95)", text("tpot", { placeholder: "50ms" })),
    field("Copies", text("replicas", { inputmode: "numeric", placeholder: "1" })),
    cluster() ? field("Image", text("image", { placeholder: "the engine's own" })) : null,
  );
}

function verdict(job) {
  const { check, error } = job;
  if (error) return h("aside", { class: "verdict" }, problem(error));
  if (!check) return h("aside", { class: "verdict" }, h("p", { class: "nodata" }, job.checking ? "Sizing…" : "Choose a model: what it needs and where it would go is shown here."));
  const decision = check.decision;
  return h(
    "aside",
    { class: `verdict ${job.checking ? "busy" : ""}`, "aria-label": "What it needs and where it would go" },
    check.fits
      ? h("p", { class: "notice ok" }, h("strong", {}, fitsText(check)), h("small", {}, decision.because ?? ""), check.service?.text && h("small", {}, `Serves ${check.service.text}.`), check.service?.unused && h("small", {}, `${check.service.unused}.`), check.copies > 1 && h("small", {}, `${check.copies >= 16 ? "16 or more" : check.copies} copies would fit beside what runs now.`))
      : h("p", { class: "notice bad" }, h("strong", {}, decision.summary ?? "It does not fit."), ...(decision.would_fit ?? []).map((one) => h("small", { key: one }, one))),
    !job.editing && !cluster() && state.models.some((one) => one.name === job.form.name) && h("p", { class: "notice warn", role: "alert" }, h("strong", {}, `${job.form.name} is deployed already`), h("small", {}, "Deploying replaces it. Choose another name to keep both.")),
    h("h3", {}, `Memory, ${check.footprint.exactness === "estimated" ? "estimated" : check.footprint.exactness}`),
    waterfall(check.footprint),
    h("h3", {}, "GPU by GPU"),
    h("ul", { class: "devices" }, check.devices.map((one) => h("li", { key: one.device_id, class: String(one.verdict).replace(" ", "-") }, h("b", {}, one.device_id), h("em", {}, one.verdict), h("span", {}, one.text)))),
    check.variants.length ? [h("h3", {}, "What would take less"), h("ul", { class: "variants" }, check.variants.map((one) => h("li", { key: one.change }, button([one.change, h("em", { class: one.fits ? "ok" : "bad" }, `${bytes(one.total_bytes, { up: true })} ${one.fits ? "fits" : "does not fit"}`)], () => applyVariant(job, one), { class: "variant" }))))] : null,
    check.footprint.notes.map((note) => h("p", { key: note, class: "dim small" }, note)),
  );
}

function applyVariant(job, variant) {
  for (const [key, value] of Object.entries(variant.fields)) job.form[key] = String(value);
  recheck(job, 0);
  drawLayers();
}

async function submit(job, close) {
  job.progress = { lines: [], done: false, refused: null, part: null };
  drawLayers();
  const stack = JSON.stringify({ models: { [stackName(job)]: toFields(job) } });
  await act(job.editing ? `${job.form.name} was changed.` : `${job.form.name} is ${cluster() ? "applied" : "deployed"}.`, async () => {
    try {
      await apiLines("/apply", { stack, base_directory: null, namespace: job.form.namespace || null }, (event) => noteProgress(job, event));
      if (job.progress.refused || job.progress.failed) throw job.progress.failed ?? Object.assign(new Error(job.progress.refused.summary), { hint: null });
      close();
    } catch (error) {
      job.progress.done = true;
      if (!job.progress.refused) job.progress.failed = error;
      if (error.status === 401) job.progress = null;
      drawLayers();
      throw error;
    }
  });
}

function noteProgress(job, event) {
  const { progress } = job;
  if (event.event === "plan" && event.refusals?.length) [progress.refused] = event.refusals;
  else if (event.event === "progress") progress.part = event.total_bytes ? event.done_bytes / event.total_bytes : null;
  else if (event.event === "error") progress.failed = Object.assign(new Error(event.message ?? event.text), { hint: event.page_hint ?? event.hint });
  if (event.event !== "progress" && event.text) progress.lines = [...progress.lines, event.text].slice(-12);
  if (event.event === "refused") say(event.text, "bad");
  drawLayers();
  changed();
}

function progressView(job) {
  const { progress } = job;
  return h(
    "div",
    { class: "progress" },
    progress.refused ? refusal(progress.refused) : null,
    progress.failed && problem(progress.failed),
    h("ol", { "aria-live": "polite" }, progress.lines.map((line, at) => h("li", { key: `${at}${line}` }, line))),
    progress.part !== null && h("div", { class: "meter tall" }, h("i", { class: "ok", style: { width: `${progress.part * 100}%` } }), h("span", {}, percent(progress.part))),
    !progress.done && h("p", { class: "dim" }, "Working. You may close this: the deployment goes on."),
  );
}

export function refusal(found) {
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("strong", {}, found.summary),
    h("ul", {}, (found.reasons ?? []).map((one) => h("li", { key: one.device ?? one.device_id }, `${one.device ?? one.device_id}: ${one.text}`))),
    (found.would_fit ?? []).length ? [h("strong", {}, "It would fit with one of these:"), h("ul", {}, found.would_fit.map((one) => h("li", { key: one }, one)))] : null,
  );
}

