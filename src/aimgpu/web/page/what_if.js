// What if: add models, remove some, change a layout; the GPUs before and after, and every step between, without doing any.

import { api, apiText } from "./api.js";
import { askStop, openKeys } from "./actions.js";
import { findModels, openDeploy, refusal } from "./deploy.js";
import { h, prose } from "./dom.js";
import { bytes, shortModel } from "./format.js";
import { gpuBar, takenPart } from "./gpu_bars.js";
import { openLayout } from "./layout.js";
import { changed, cluster, findModel, named, state } from "./store.js";
import { announceOnce, button, card, complain, copy, field, openDialog, problem } from "./ui.js";

const idea = { add: [], remove: [], layouts: {}, mayMove: true, mayStop: false, answer: null, error: null, draft: { model: "", context: "", concurrency: "", precision: "" }, turn: 0 };

export function whatIfView() {
  const touched = idea.add.length || idea.remove.length || Object.keys(idea.layouts).length;
  return [
    h("p", { class: "lead" }, "Suppose something, and see what would move before anything does. Nothing changes until you say so."),
    touched ? null : questionsCard(),
    h(
      "div",
      { class: `two ideas ${touched ? "touched" : ""}` },
      card("Suppose", touched ? button("Start over", reset, { class: "link" }) : null, supposeForm()),
      h("div", { class: "stack" }, card("Then", null, answerView(touched)), idea.answer ? barsCard() : null),
    ),
  ];
}

/** Of what runs here: a question is asked with one click, and refined in the form. */
function questionsCard() {
  const holds = state.models.filter((model) => model.granted_bytes);
  const largest = holds.reduce((most, one) => (most && most.granted_bytes >= one.granted_bytes ? most : one), null);
  const gpu = state.gpus.find((one) => one.layouts.some((layout) => layout.name !== one.layout));
  const finest = gpu?.layouts.filter((layout) => layout.name !== gpu.layout).reduce((most, one) => (most && most.partitions >= one.partitions ? most : one), null);
  const questions = [
    ["Does a 7B model for chat fit as well?", () => addFound("Qwen2.5-7B-Instruct")],
    ["And one of 70B?", () => addFound("Llama-3.3-70B-Instruct")],
    largest && [`A second ${largest.name}?`, () => add(largest.model, { context: largest.context, concurrency: largest.concurrency })],
    largest && [`What is free without ${largest.name}?`, () => suppose({ remove: [largest.name] })],
    finest && [`What if gpu${gpu.index} had layout ${finest.name}?`, () => suppose({ layouts: { [gpu.id]: finest.name } })],
  ].filter(Boolean);
  return card("Ask", null, h("div", { class: "row pad" }, questions.map(([text, ask]) => button(text, ask, { key: text, class: "quiet" }))));
}

function suppose(supposed) {
  Object.assign(idea, supposed);
  rethink();
}

function reset() {
  Object.assign(idea, { add: [], remove: [], layouts: {}, answer: null, error: null });
  changed();
}

async function rethink() {
  idea.turn += 1;
  const turn = idea.turn;
  if (!idea.add.length && !idea.remove.length && !Object.keys(idea.layouts).length) {
    idea.answer = idea.error = null;
    return changed();
  }
  try {
    const answer = await api("POST", "/what-if", { add: idea.add.map(({ name, fields }) => ({ name, fields })), remove: idea.remove, layouts: idea.layouts, may_move: !cluster() && idea.mayMove, may_stop: !cluster() && idea.mayStop });
    if (turn === idea.turn) {
      [idea.answer, idea.error] = [answer, null];
      announceOnce(idea, `${supposedText(answer)} ${answer.because}`);
    }
  } catch (error) {
    if (turn === idea.turn) [idea.answer, idea.error] = [null, error];
  }
  return changed();
}

function supposedText(answer) {
  return answer.fits ? "It fits." : "Not all of it fits.";
}

function supposeForm() {
  const { draft } = idea;
  const set = (key) => (event) => { draft[key] = event.target.value; };
  const input = (key, placeholder, props = {}) => h("input", { type: "text", value: draft[key], placeholder, oninput: set(key), autocomplete: "off", ...props });
  return h(
    "div",
    { class: "pad suppose" },
    h("h3", {}, "A model is added"),
    h(
      "form",
      { class: "fields", onsubmit: (event) => { event.preventDefault(); addModel(event.target); } },
      field("Model", input("model", "Qwen/Qwen2.5-7B-Instruct"), null, { class: "field wide" }),
      field("Context", input("context", "8192", { inputmode: "numeric" })),
      field("Requests at once", input("concurrency", "8", { inputmode: "numeric" })),
      field("Precision", input("precision", "fp16")),
      h("button", { type: "submit", class: "quiet" }, "Add"),
    ),
    idea.add.length ? h("ul", { class: "chips" }, idea.add.map((one) => h("li", { key: one.name }, `+ ${one.name}: ${one.fields.model}`, button("✕", () => { idea.add = idea.add.filter((other) => other !== one); rethink(); }, { class: "more", "aria-label": `Remove ${one.name}` })))) : null,
    h("h3", {}, "Models are removed"),
    state.models.some((model) => model.granted_bytes) ? h("div", { class: "checks" }, state.models.filter((model) => model.granted_bytes).map((model) => h("label", { key: model.name, class: "check" }, h("input", { type: "checkbox", checked: idea.remove.includes(model.name), onchange: (event) => { idea.remove = event.target.checked ? [...idea.remove, model.name] : idea.remove.filter((name) => name !== model.name); rethink(); } }), `${model.name} (${bytes(model.granted_bytes, { up: true })})`))) : h("p", { class: "dim small" }, "None holds GPU memory."),
    h("h3", {}, "Layouts change"),
    state.gpus.map((gpu) => field(`gpu${gpu.index}`, h("select", { value: idea.layouts[gpu.id] ?? gpu.layout, onchange: (event) => { if (event.target.value === gpu.layout) delete idea.layouts[gpu.id]; else idea.layouts[gpu.id] = event.target.value; rethink(); } }, gpu.layouts.map((one) => h("option", { key: one.name, value: one.name }, `${one.name}${one.name === gpu.layout ? " (now)" : ""}`))), null, { key: gpu.id })),
    cluster()
      ? h("p", { class: "dim small" }, "On a cluster nothing is moved to make room; kube-scheduler may evict pods of lower priority.")
      : [
          h("h3", {}, "To make room, the plan"),
          h("label", { class: "check" }, h("input", { type: "checkbox", checked: idea.mayMove, onchange: (event) => { idea.mayMove = event.target.checked; rethink(); } }), "may move running models"),
          h("label", { class: "check" }, h("input", { type: "checkbox", checked: idea.mayStop, onchange: (event) => { idea.mayStop = event.target.checked; rethink(); } }), "may stop models of lower priority")
        ],
  );
}

function addModel() {
  const { draft } = idea;
  if (!draft.model.trim()) return;
  addFound(draft.model.trim(), { context: Number(draft.context), concurrency: Number(draft.concurrency), precision: draft.precision.trim() });
}

/** The model of that name, in the form that an engine here reads; else what has the name in its own and runs here. */
async function addFound(text, fields = {}) {
  let found = [];
  try {
    found = await findModels(text);
  } catch {
    // the supposition itself reports it
  }
  const exact = found.find((one) => one.name === text || one.model === text);
  const best = exact ?? found.find((one) => one.runs_here) ?? found.find((one) => one.engine) ?? found[0];
  add(best?.model ?? text, fields);
}

function add(model, fields) {
  const base = shortModel(model).split(":")[0].toLowerCase().replace(/-gguf$/, "").replace(/[^a-z0-9._-]/g, "-").slice(0, 24) || "model";
  const taken = new Set([...state.models.map((one) => one.name), ...idea.add.map((one) => one.name)]);
  let name = base;
  for (let count = 2; taken.has(name); count += 1) name = `${base}-${count}`;
  suppose({ add: [...idea.add, { name, fields: { model, ...Object.fromEntries(Object.entries(fields).filter(([, value]) => value)) } }] });
}

function answerView(touched) {
  if (idea.error) return h("div", { class: "pad" }, problem(idea.error));
  if (!touched) return h("p", { class: "nodata" }, "Ask one of the questions above, or fill in the form: what would happen is shown here.");
  if (!idea.answer) return h("p", { class: "nodata" }, "Thinking…");
  const { answer } = idea;
  return h(
    "div",
    { class: "pad" },
    h("p", { class: `notice ${answer.fits ? "ok" : "bad"}` }, h("strong", {}, supposedText(answer)), h("small", {}, named(answer.because))),
    answer.steps.length ? [h("h3", {}, "What would be done first"), h("ol", { class: "steps" }, answer.steps.map((step, at) => h("li", { key: at }, named(step))))] : h("p", { class: "dim" }, "Nothing that runs would be disturbed."),
    answer.placements.length ? [h("h3", {}, "Where the new ones go"), h("ul", {}, answer.placements.map((one) => h("li", { key: one.ask }, h("b", {}, one.ask), ` ${one.slots.map((slot) => `${bytes(slot.memory_bytes, { up: true })} of ${named(slot.partition_id)}`).join(", ")}`, h("small", {}, named(one.because)))))] : null,
    answer.refusals.map((one) => refusal(one)),
    h("h3", {}, "Do it"),
    h("div", { class: "row" }, steps().map(([text, run]) => button(text, run, { key: text, class: "quiet" }))),
  );
}

/** Each part of the supposition is done in its own dialog, which shows it once more. */
function steps() {
  const cannot = state.session.write ? null : state.session.reason ?? "Changes need a key.";
  if (cannot) return [[cannot, () => openKeys(cannot)]];
  return [
    ...idea.remove.map(findModel).filter(Boolean).map((model) => [`Stop ${model.name}…`, () => askStop(model)]),
    ...state.gpus.filter((gpu) => gpu.id in idea.layouts).map((gpu) => [`Change gpu${gpu.index} to ${idea.layouts[gpu.id]}…`, () => openLayout(gpu, idea.layouts[gpu.id])]),
    ...idea.add.map(({ name, fields }) => [`Deploy ${name}…`, () => openDeploy(null, { name, ...Object.fromEntries(Object.entries(fields).map(([key, value]) => [key, String(value)])) })]),
  ];
}

function barsCard() {
  const { before, after } = idea.answer;
  const known = new Set(before.flatMap((gpu) => gpu.partitions.flatMap((part) => part.shares.map((share) => share.instance))));
  const marked = after.map((gpu) => ({ ...gpu, partitions: gpu.partitions.map((part) => ({ ...part, shares: part.shares.map((share) => ({ ...share, fresh: !known.has(share.instance) })) })) }));
  const fullest = (at) => Math.max(takenPart(before[at]), takenPart(marked[at])); // both drawn to one scale
  return card(
    "Before and after",
    h("span", { class: "hint" }, h("b", { class: "swatch fresh" }), "new or moved"),
    before.map((gpu, at) => h("div", { key: gpu.id, class: "gpu pair" }, h("div", { class: "gpuTitle" }, h("b", {}, `gpu${gpu.index}`), h("span", { class: "dim" }, gpu.layout === marked[at].layout ? gpu.layout : `${gpu.layout} → ${marked[at].layout}`)), h("small", {}, "now"), gpuBar(gpu, { most: fullest(at) }), h("small", {}, "then"), gpuBar(marked[at], { most: fullest(at) }))),
  );
}

export async function openStack() {
  try {
    const text = await apiText("/stack");
    openDialog(
      (close) => [
        h("header", {}, h("h2", {}, "Stack file for what is deployed"), h("span", { class: "grow" }), button("✕", close, { class: "more", "aria-label": "Close" })),
        h("p", { class: "dim" }, prose("Save it as stack.yaml; `aimgpu up --file stack.yaml` brings the same models back, here or on another machine.")),
        h("pre", { class: "tallText", tabindex: "0" }, text),
        h("footer", {}, button("Copy", () => copy(text, "the stack file"), { class: "quiet" }), h("a", { class: "button primary", href: `data:application/yaml;charset=utf-8,${encodeURIComponent(text)}`, download: "stack.yaml" }, "Download")),
      ],
      { label: "Stack file", wide: true },
    );
  } catch (error) {
    complain(error);
  }
}
