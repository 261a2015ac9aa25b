// Deploy a model: it is found by any part of its name; every further change is sized and placed at once, so that the answer
// is known before it is submitted.

import { openKeys } from "./actions.js";
import { api, apiLines } from "./api.js";
import { h } from "./dom.js";
import { bytes, percent, sentence } from "./format.js";
import { changed, cluster, named, state } from "./store.js";
import { announce, announceOnce, button, complain, drawLayers, field, moveByArrows, openDialog, problem, say, unseen } from "./ui.js";
import { waterfall } from "./waterfall.js";

const KINDS = ["memory", "fraction", "partition", "whole"];
const PRECISIONS = ["fp16", "bf16", "fp8", "int8", "int4"];
const MOST_FOUND = 8;
const UNSET = { name: "", model: "", engine: "", precision: "", context: "", concurrency: "", gpu: "auto", amount: "", isolation: "none", priority: "medium", keep: "always", ttft: "", tpot: "", replicas: "", image: "" };
let catalogue = null;

/** `given`: fields that are filled in; `find`: what is typed into the search. */
export async function openDeploy(name = null, given = {}, { find = "" } = {}) {
  const base = name ? await readFields(name) : {};
  if (!base) return;
  const form = { ...UNSET, namespace: cluster()?.models[name] ?? cluster()?.namespace ?? "", ...given };
  if (name) Object.assign(form, fromFields(name, base));
  const before = name ? { ...form } : { gpu: "auto", amount: "" };
  if (name) Object.assign(form, given);
  else if (form.model) form.name = freeName(form.name || shortName(form.model));
  else form.model = find;
  const job = { form, base, before, check: null, error: null, checking: false, progress: null, refused: null, failed: null, editing: Boolean(name), timer: null, turn: 0, found: null, chosen: Boolean(name || given.model), named: Boolean(given.name), options: Boolean(name) || Object.keys(given).some((key) => key !== "name" && key !== "model") };
  openDialog((close) => view(job, close), { label: name ? `Edit ${name}` : "Deploy a model", wide: true, onClose: () => clearTimeout(job.timer) });
  if (job.chosen) recheck(job, 0);
  else lookUp(job, 0);
  if (!catalogue) {
    try {
      catalogue = await api("GET", "/catalogue");
    } catch {
      catalogue = { models: [], engines: [] };
    }
    drawLayers();
  }
}

/** Of "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M": "qwen2.5-7b". */
export function shortName(model) {
  const last = model.trim().split("/").pop().split(":")[0].toLowerCase();
  const short = last.replace(/[.-]gguf$/, "").replace(/-(instruct|it|chat)\b/, "").replace(/[^a-z0-9._-]/g, "-").slice(0, 40);
  return short.replace(/^[^a-z0-9]+|[^a-z0-9]+$/g, "") || "model";
}

export async function findModels(text) {
  return (await api("GET", `/models/search?q=${encodeURIComponent(text.trim())}`)).models;
}

/** What is found is offered; only a name that is whole, or of which nothing is known, is sized as it stands. */
function lookUp(job, delay = 200) {
  clearTimeout(job.timer);
  job.timer = setTimeout(async () => {
    job.turn += 1;
    const turn = job.turn;
    const text = job.form.model.trim();
    let found = [];
    try {
      found = await findModels(text);
    } catch {
      // sizing reports it
    }
    if (turn !== job.turn) return;
    job.found = found;
    // On a cluster every engine can be chosen, so a whole name stands for itself there.
    const exact = found.some((one) => (one.model === text && one.engine) || (cluster() && one.name === text));
    if (exact || (text && !found.length)) choose(job, text);
    else announceOnce(job, found.length ? `${found.length} models found` : "");
    drawLayers();
  }, delay);
}

function choose(job, model) {
  job.form.model = model;
  job.chosen = true;
  if (!job.named) job.form.name = freeName(shortName(model));
  recheck(job, 0);
}

function freeName(wanted) {
  const names = new Set(state.models.map((model) => model.name));
  if (!names.has(wanted)) return wanted;
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
  job.refused = job.failed = null;
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
        announceOnce(job, found.fits ? fitsText(found) : named(found.decision.summary ?? "It does not fit."));
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
    job.progress ? progressView(job) : [searchView(job), job.chosen ? h("div", { key: "deploy", class: "deploy" }, formView(job), verdict(job)) : foundView(job)],
    !job.progress &&
      h(
        "footer",
        { class: "bottom" },
        h("span", { class: "grow" }, cannot ?? shortVerdict(job)),
        button("Cancel", close, { class: "quiet" }),
        button(job.editing ? "Apply" : "Deploy", () => submit(job, close), { class: "primary", disabled: Boolean(cannot) || !job.chosen || !job.form.model.trim() || Boolean(job.error) }),
      ),
  ];
}

/** Beside the button, where it is seen however long the form is. */
function shortVerdict(job) {
  if (!job.chosen) return null;
  if (job.refused || job.failed) return h("strong", { class: "bad" }, job.editing ? "Not changed" : "Not deployed");
  if (job.error) return h("strong", { class: "bad" }, "This cannot be deployed");
  if (!job.check) return job.checking ? h("span", { class: "dim" }, "Sizing…") : null;
  return job.check.fits ? h("strong", { class: "ok" }, fitsText(job.check)) : h("strong", { class: "bad" }, `Does not fit: needs ${bytes(job.check.footprint.total_bytes, { up: true })}`);
}

function searchView(job) {
  const type = (event) => {
    job.form.model = event.target.value;
    Object.assign(job, { check: null, error: null, refused: null, failed: null });
    if (job.editing) recheck(job);
    else {
      job.chosen = false;
      lookUp(job);
    }
    drawLayers();
  };
  return field("Model", h("input", { type: "text", class: "large", value: job.form.model, oninput: type, autocomplete: "off", spellcheck: "false", placeholder: "any part of a name, a path of a .gguf file, an Ollama tag", autofocus: true }), null, { key: "search" });
}

function foundView(job) {
  if (!job.found) return h("p", { key: "found", class: "nodata" }, "Looking…");
  const shown = job.found.slice(0, MOST_FOUND);
  const left = job.found.length - shown.length;
  return h(
    "div",
    { key: "found", class: "found", role: "group", "aria-label": "Models found", onkeydown: moveByArrows },
    shown.map((one) =>
      h(
        "button",
        { key: one.name, type: "button", class: "candidate", disabled: !one.engine, onclick: () => { choose(job, one.model); drawLayers(); document.querySelector(".deploy input")?.focus(); } },
        h("b", {}, one.name),
        h("span", {}, one.runs_here ? h("em", { class: "ok" }, "runs here") : h("em", {}, one.engine ? "no room" : "no engine for it"), unseen(". ")),
        h("small", {}, [one.on_disk ? "on disk" : one.download_bytes ? `${bytes(one.download_bytes, { up: true })} to download` : null, one.memory_bytes ? `needs ${bytes(one.memory_bytes, { up: true })}` : null, one.engine].filter(Boolean).join(" · ")),
        one.reason && h("small", {}, whyNot(one)),
      ),
    ),
    left > 0 ? h("p", { key: "left", class: "dim small" }, `and ${left} more: type more of the name`) : null,
    !shown.length && h("p", { key: "none", class: "nodata" }, "Type any part of a name."),
  );
}

/** Without the name, which stands above, and without each engine's own reason. */
function whyNot({ name, reason }) {
  return sentence((reason.startsWith(`${name} `) ? reason.slice(name.length + 1) : reason).split(" (")[0]);
}

function formView(job) {
  const { form } = job;
  const set = (key) => (event) => {
    form[key] = event.target.value;
    if (key === "name") job.named = true;
    recheck(job);
    drawLayers();
  };
  const text = (key, props = {}) => h("input", { type: "text", value: form[key], oninput: set(key), autocomplete: "off", spellcheck: "false", ...props });
  const toggle = () => {
    job.options = !job.options;
    drawLayers();
  };
  return h(
    "form",
    { class: "fields", onsubmit: (event) => event.preventDefault() },
    field("Name that callers use", text("name", { disabled: job.editing }), null, { class: "field wide" }),
    !job.editing && h("div", { class: "wide" }, button(job.options ? "Fewer options" : "Options", toggle, { class: "link strong", "aria-expanded": job.options ? "true" : "false" }), !job.options && h("small", {}, "engine, context, memory, priority, promises")),
    job.options && optionFields(job, text, set),
  );
}

function optionFields({ form, editing }, text, set) {
  const choice = (key, options) => h("select", { value: form[key], onchange: set(key) }, options.map(([value, label]) => h("option", { key: value, value }, label)));
  const engines = catalogue?.engines ?? [];
  return [
    cluster() ? field("Namespace", text("namespace", { disabled: editing })) : null,
    field("Engine", choice("engine", [["", "best available"], ...engines.map((one) => [one.name, one.available ? one.name : `${one.name} (not here)`])])),
    field("Context, tokens", text("context", { inputmode: "numeric", placeholder: "the model's own" })),
    field("Requests at once", text("concurrency", { inputmode: "numeric", placeholder: "the engine's own" })),
    field("Precision", choice("precision", [["", "as published"], ...[...new Set([...PRECISIONS, ...(form.precision ? [form.precision] : [])])].map((one) => [one, one])])),
    field("Of the GPU", choice("gpu", [["auto", "as much as it needs"], ["memory", "memory"], ["fraction", "fraction"], ["partition", "a partition"], ["whole", "whole GPUs"]])),
    form.gpu !== "auto" ? field({ memory: "How much", fraction: "Which part", partition: "Which kind", whole: "How many" }[form.gpu], text("amount", { placeholder: { memory: "24GiB", fraction: "50%", partition: "cpx", whole: "1" }[form.gpu] })) : null,
    field("Priority", choice("priority", [["high", "high"], ["medium", "medium"], ["low", "low"]])),
    field("Isolation at least", choice("isolation", [["none", "need not be enforced"], ["advisory", "watched"], ["enforced", "enforced"], ["hardware", "enforced by hardware"]])),
    field("Keep loaded", text("keep", { placeholder: "always, or 10m" })),
    field("First token within (p95)", text("ttft", { placeholder: "500ms" })),
    field("Per token within (p95)", text("tpot", { placeholder: "50ms" })),
    field("Copies", text("replicas", { inputmode: "numeric", placeholder: "1" })),
    cluster() ? field("Image", text("image", { placeholder: "the engine's own" })) : null,
  ];
}

function verdict(job) {
  const { check, error } = job;
  if (job.refused) return h("aside", { class: "verdict" }, refusal(job.refused));
  if (error || job.failed) return h("aside", { class: "verdict" }, problem(error ?? job.failed));
  if (!check) return h("aside", { class: "verdict" }, h("p", { class: "nodata" }, "Sizing…"));
  const decision = check.decision;
  return h(
    "aside",
    { class: `verdict ${job.checking ? "busy" : ""}`, "aria-label": "What it needs and where it would go" },
    check.fits
      ? h("p", { class: "notice ok" }, h("strong", {}, fitsText(check)), decision.because && h("small", {}, named(sentence(decision.because))), check.service?.text && h("small", {}, `Serves ${check.service.text}.`), check.service?.unused && h("small", {}, `${check.service.unused}.`), check.copies > 1 && h("small", {}, `${check.copies >= 16 ? "16 or more" : check.copies} copies would fit beside what runs now.`))
      : h("p", { class: "notice bad" }, h("strong", {}, named(decision.summary ?? "It does not fit.")), ...(decision.would_fit ?? []).map((one) => h("small", { key: one }, named(one)))),
    !job.editing && !cluster() && state.models.some((one) => one.name === job.form.name) && h("p", { class: "notice warn", role: "alert" }, h("strong", {}, `${job.form.name} is deployed already`), h("small", {}, "Deploying replaces it. Choose another name to keep both.")),
    h("h3", {}, `Memory, ${check.footprint.exactness === "estimated" ? "estimated" : check.footprint.exactness}`),
    waterfall(check.footprint),
    h("h3", {}, "GPU by GPU"),
    h("ul", { class: "devices" }, check.devices.map((one) => h("li", { key: one.device_id, class: String(one.verdict).replace(" ", "-") }, h("b", {}, named(one.device_id)), h("em", {}, one.verdict), h("span", {}, named(one.text))))),
    check.variants.length ? [h("h3", {}, "What would take less"), h("ul", { class: "variants" }, check.variants.map((one) => h("li", { key: one.change }, button([one.change, h("em", { class: one.fits ? "ok" : "bad" }, `${bytes(one.total_bytes, { up: true })} ${one.fits ? "fits" : "does not fit"}`)], () => applyVariant(job, one), { class: "variant" }))))] : null,
    check.footprint.notes.map((note) => h("p", { key: note, class: "dim small" }, note)),
  );
}

function applyVariant(job, variant) {
  for (const [key, value] of Object.entries(variant.fields)) job.form[key] = String(value);
  recheck(job, 0);
  drawLayers();
}

/** What is refused leaves the form as it was, with the reason beside it. */
async function submit(job, close) {
  const progress = { lines: [], refused: null, failed: null, part: null };
  job.progress = progress;
  drawLayers();
  const stack = JSON.stringify({ models: { [stackName(job)]: toFields(job) } });
  try {
    await apiLines("/apply", { stack, base_directory: null, namespace: job.form.namespace || null }, (event) => noteProgress(progress, event));
  } catch (error) {
    progress.failed = error;
  }
  job.progress = null;
  job.refused = progress.refused;
  if (progress.refused) announce(progress.refused.summary);
  else if (progress.failed?.status === 401) openKeys(progress.failed.message);
  else if (progress.failed) job.failed = progress.failed;
  else {
    say(job.editing ? `${job.form.name} was changed.` : `${job.form.name} is ${cluster() ? "applied" : "deployed"}.`);
    close();
  }
  drawLayers();
  document.querySelector(".verdict .notice.bad")?.scrollIntoView({ block: "nearest" }); // on a narrow screen it is below the form
  changed();
}

function noteProgress(progress, event) {
  if (event.event === "plan" && event.refusals?.length) [progress.refused] = event.refusals;
  else if (event.event === "progress") progress.part = event.total_bytes ? event.done_bytes / event.total_bytes : null;
  else if (event.event === "error") progress.failed = Object.assign(new Error(event.message ?? event.text), { hint: event.page_hint ?? event.hint });
  if (event.event !== "progress" && event.text) progress.lines = [...progress.lines, named(event.text)].slice(-12);
  drawLayers();
  changed();
}

function progressView({ progress }) {
  return h(
    "div",
    { key: "progress", class: "progress" },
    h("ol", { "aria-live": "polite" }, progress.lines.map((line, at) => h("li", { key: `${at}${line}` }, line))),
    progress.part !== null && h("div", { class: "meter tall" }, h("i", { class: "ok", style: { width: `${progress.part * 100}%` } }), h("span", {}, percent(progress.part))),
    h("p", { class: "dim" }, "Working. You may close this: the deployment goes on."),
  );
}

export function refusal(found) {
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("strong", {}, named(found.summary)),
    h("ul", {}, (found.reasons ?? []).map((one) => h("li", { key: one.device ?? one.device_id }, named(`${one.device ?? one.device_id}: ${one.text}`)))),
    (found.would_fit ?? []).length ? [h("strong", {}, "It would fit with one of these:"), h("ul", {}, found.would_fit.map((one) => h("li", { key: one }, named(one))))] : null,
  );
}

