// The Model Manager: tiles, GPUs, models, who had the GPU, and what happened.

import { modelActions } from "./actions.js";
import { sparkline } from "./charts.js";
import { openDeploy } from "./deploy.js";
import { h } from "./dom.js";
import { openDrawer } from "./drawer.js";
import { ago, bytes, clock, duration, gib, gibParts, hue, NONE, number, percent, promiseText, rate, shortModel, unjudged } from "./format.js";
import { gpuBar, gpuLegend, gpuTitle } from "./gpu_bars.js";
import { openLayout } from "./layout.js";
import { cluster, findModel, go, state } from "./store.js";
import { timelineCard } from "./timeline.js";
import { brief, button, card, empty, level, openMenu, pill, unseen } from "./ui.js";

export function modelsView() {
  return [tiles(), gpusCard(), modelsCard(), h("div", { class: "two" }, timelineCard(60), eventsCard())];
}

function tiles() {
  const recent = state.history.slice(-60);
  const series = (key) => recent.map((sample) => Object.values(sample.models).reduce((sum, one) => sum + (one[key] ?? 0), 0));
  const traffic = state.models.map((model) => model.traffic).filter(Boolean);
  const sum = (key) => traffic.reduce((total, one) => total + (one[key] ?? 0), 0);
  const total = state.gpus.reduce((all, gpu) => all + gpu.memory_bytes, 0);
  const granted = state.gpus.reduce((all, gpu) => all + gpu.granted_bytes, 0);
  const waiting = traffic.reduce((all, one) => all + Object.values(one.waiting).reduce((a, b) => a + b, 0), 0);
  const running = sum("running");
  const kept = promisesKept();
  return h(
    "section",
    { class: "tiles", "aria-label": "Now" },
    tile("Requests per second", rate(series("rps").at(-1) ?? 0), sparkline(series("rps"), "var(--m1)", "Requests per second, last five minutes")),
    tile("Tokens per second", rate(series("tps").at(-1) ?? 0), sparkline(series("tps"), "var(--m3)", "Tokens per second, last five minutes")),
    tile("GPU memory granted", h("span", {}, gib(granted, { up: true }), h("small", {}, ` of ${gib(total)} GiB`)), h("p", {}, measuredText())),
    tile("Promises kept, 6 hours", h("span", { class: kept.tone }, kept.text), h("p", {}, kept.note)),
    tile("Running · waiting", h("span", {}, brief([number(running), h("small", {}, ` · ${number(waiting)}`)], `${number(running)} running, ${number(waiting)} waiting`)), h("p", {}, waitingNote(traffic))),
  );
}

/** A sum without a GPU that holds models and does not report its use would look as if they used nothing. */
function measuredText() {
  const known = state.gpus.filter((gpu) => gpu.measured_bytes !== null);
  if (!known.length) return "measured: the GPU does not report it";
  const silent = state.gpus.filter((gpu) => gpu.measured_bytes === null && gpu.granted_bytes).map((gpu) => gpu.index);
  if (silent.length) return `measured: GPU ${silent.join(", ")} ${silent.length > 1 ? "do" : "does"} not report it`;
  return `measured ${gib(known.reduce((all, gpu) => all + gpu.measured_bytes, 0), { up: true })} GiB`;
}

function tile(name, value, below) {
  return h("div", { class: "tile" }, h("small", {}, name), h("div", { class: "big" }, value), below);
}

function promisesKept() {
  const all = state.models.flatMap((model) => model.targets.map((target) => ({ ...target, model: model.name })));
  const judged = all.filter((target) => target.attainment !== null);
  if (!judged.length) return { text: NONE, tone: "", note: all.length ? "no request was judged yet" : "nothing was promised" };
  const kept = judged.filter((target) => target.attainment >= target.target_part);
  const worst = judged.reduce((least, one) => (one.attainment - one.target_part < least.attainment - least.target_part ? one : least));
  return { text: `${kept.length} of ${judged.length}`, tone: kept.length === judged.length ? "ok" : "bad", note: `${kept.length === judged.length ? "tightest" : "worst"}: ${worst.model} ${worst.name.replace("_", " ")}, ${percent(worst.attainment, 1)}` };
}

/** "2 low, longest 1.2 s" */
function waitingNote(traffic) {
  const pressure = Object.values(state.queue.pressure ?? {});
  const longest = Math.max(...traffic.map((one) => one.longest_wait_seconds ?? 0), 0);
  const classes = ["high", "medium", "low"].map((name) => [name, traffic.reduce((all, one) => all + (one.waiting[name] ?? 0), 0)]).filter(([, count]) => count);
  const waiting = classes.length ? `${classes.map(([name, count]) => `${number(count)} ${name}`).join(", ")}${longest ? `, longest ${duration(longest)}` : ""}` : "nothing waits";
  return pressure.length ? `${waiting}; ${pressure[0].reason}` : waiting;
}

export function gpusCard() {
  return card(
    "GPUs",
    h("span", { class: "hint", "aria-hidden": "true" }, h("b", { class: "swatch solid" }), "weights ", h("b", { class: "swatch kv" }), "KV cache ", h("b", { class: "swatch over" }), "overhead ", h("b", { class: "swatch line" }), "measured"),
    state.gpus.length ? state.gpus.map(gpuRow) : empty("No GPU was found", cluster() ? "No node agent has reported one yet: `kubectl get gpunodes`." : "Start the daemon with simulated ones to look around: `aimgpu up --simulate MI300X`."),
  );
}

function gpuRow(gpu) {
  return h(
    "div",
    { key: gpu.id, class: "gpu" },
    h(
      "div",
      { class: "gpuTitle" },
      h("b", {}, `GPU ${gpu.index}`),
      h("span", { class: "strong" }, gpu.name),
      unseen(", "),
      gpu.simulated && h("span", { class: "chip" }, "simulated", unseen(", ")),
      gpu.error && h("span", { class: "chip", title: gpu.error }, "cannot be read", unseen(", ")),
      h("span", { class: "dim" }, gpuTitle(gpu)),
      unseen(", "),
      h("span", { class: "grow" }),
      h("span", { class: "dim" }, memoryOf(gpu)),
      button("Layout…", () => openLayout(gpu), { class: "link", "aria-label": `Change the layout of GPU ${gpu.index}` }),
    ),
    gpuBar(gpu, { onModel: openDrawer }),
    gpuLegend(gpu),
  );
}

/** "51.6 granted · 3.1 used by other processes · 137.2 free of 191.9 GiB": the parts add up as they are shown. */
function memoryOf(gpu) {
  const unusable = gpu.memory_bytes - gpu.granted_bytes - gpu.foreign_bytes - gpu.free_bytes; // the rest of a partition that one model has alone
  const taken = [[gpu.granted_bytes, "granted"], [gpu.foreign_bytes, "used by other processes"], [unusable, "unusable"]].filter(([size], at) => size >= 2 ** 30 / 10 || !at);
  const { parts, rest, total } = gibParts(gpu.memory_bytes, taken.map(([size]) => size));
  return `${[...taken.map(([, name], at) => `${parts[at]} ${name}`), `${rest} free`].join(" · ")} of ${total} GiB`;
}

function modelsCard() {
  const aside = h("span", { class: "dim" }, state.models.length ? `${state.models.length} deployed` : "");
  if (!state.models.length) return card("Models", aside, noModels());
  const heads = ["Model", "State", "Where", "Granted / measured", "Req/s · run · wait", "TTFT p95", "Per token p95", "Error budget"];
  return card(
    "Models",
    aside,
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "models" },
        h("thead", {}, h("tr", {}, heads.map((text) => h("th", { key: text, scope: "col" }, text)), h("th", { key: "act", scope: "col" }, h("span", { class: "sr" }, "Actions")))),
        h("tbody", {}, state.models.map(modelRow)),
      ),
    ),
  );
}

function noModels() {
  const examples = [
    ["Small, runs without a GPU", { name: "chat", model: "HuggingFaceTB/SmolLM2-135M-Instruct", context: 4096 }],
    ["7B chat model", { name: "chat", model: "Qwen/Qwen2.5-7B-Instruct", context: 8192, concurrency: 8 }],
    ["8B with a latency promise", { name: "assistant", model: "meta-llama/Llama-3.1-8B-Instruct", context: 8192, concurrency: 8, ttft: "500ms", priority: "high" }],
  ];
  return empty(
    "No model is deployed yet",
    `Choose one to see what it needs and where it would go, before anything happens. From a terminal: \`aimgpu up --file stack.yaml${cluster() ? " --on kubernetes" : ""}\`.`,
    ...examples.map(([text, given]) => button(text, () => openDeploy(null, given), { class: "quiet" })),
  );
}

function modelRow(model) {
  const traffic = model.traffic;
  const waiting = traffic ? Object.values(traffic.waiting).reduce((all, one) => all + one, 0) : null;
  return h(
    "tr",
    { key: model.name, class: `state-${model.state}` },
    h(
      "td",
      { class: "first", role: "rowheader" },
      button([h("b", { class: "swatch", style: { background: hue(model.name) } }), model.name], () => openDrawer(model.name), { class: "name" }),
      h("small", {}, shortModel(model.model)),
      h("small", {}, model.context ? brief(`${model.engine} · ${number(model.context)} × ${model.concurrency}`, `${model.engine}, context ${number(model.context)} tokens, ${model.concurrency} at once`) : model.engine),
      model.priority !== "medium" && h("small", { class: "tag" }, `${model.priority} priority`),
    ),
    h("td", { "data-label": "State" }, h("div", {}, pill(model.state, model.percent), stateNote(model), usedNotes(model).map((note) => h("small", { key: note }, note)))),
    h("td", { "data-label": "Where" }, places(model)),
    h("td", { "data-label": "Granted / measured", class: "num" }, h("div", {}, model.granted_bytes ? `${gib(model.granted_bytes, { up: true })} / ${gib(model.measured_bytes, { up: true })} GiB` : none(), Boolean(model.planned_bytes) && model.planned_bytes !== model.granted_bytes && h("small", {}, `sized ${bytes(model.planned_bytes, { up: true })}`))),
    h("td", { "data-label": "Req/s · running · waiting", class: "num" }, traffic ? brief(`${rate(traffic.requests_per_second ?? 0)} · ${traffic.running}/${traffic.slots} · ${waiting}`, `${rate(traffic.requests_per_second ?? 0)} requests per second, ${traffic.running} of ${traffic.slots} running, ${waiting} waiting`) : none()),
    h("td", { "data-label": "TTFT p95", class: "num" }, against(traffic?.ttft_p95_seconds, target(model, "ttft"))),
    h("td", { "data-label": "Per token p95", class: "num" }, against(traffic?.tpot_p95_seconds, target(model, "tpot"))),
    h("td", { "data-label": "Error budget", class: model.targets.length ? "" : "blank" }, budget(model)),
    h("td", { class: "act" }, rowActions(model)),
  );
}

/** "used 2 min ago", "unloads in 8 min" */
function usedNotes(model) {
  const used = model.last_used ? `used ${ago(model.last_used)}` : null;
  const leaves = model.pinned || model.state !== "ready" ? null : model.unload_at ? `unloads ${inTime(model.unload_at)}` : `unloads after ${duration(model.keep_seconds)} idle`;
  return [used, leaves].filter(Boolean);
}

function inTime(epoch) {
  return `in ${duration(Math.max(0, Math.round(epoch - Date.now() / 1000)))}`;
}

function stateNote(model) {
  if (model.state === "refused") return h("small", { class: "reason" }, model.reason, " ", button("what would fit?", () => openDeploy(model.name), { class: "link" }));
  if (model.state === "sleeping") return h("small", {}, model.instances[0]?.wake_seconds ? `wakes in about ${duration(model.instances[0].wake_seconds)}` : "a request wakes it");
  return model.reason && h("small", { class: `reason ${model.state === "failed" ? "bad" : ""}` }, model.reason);
}

function places(model) {
  const found = model.instances.flatMap((one) => one.places.map((place) => ({ ...place, replica: one.replica })));
  if (!found.length) return none();
  return h(
    "div",
    { class: "places" },
    found.slice(0, 3).map((place) => h("span", { key: `${place.gpu}${place.partition}${place.replica}` }, `GPU ${gpuIndex(place.gpu)} ${place.partition} `, level(place.level, place.mechanism))),
    found.length > 3 && h("small", {}, `and ${found.length - 3} more`),
  );
}

export function gpuIndex(id) {
  return state.gpus.find((gpu) => gpu.id === id)?.index ?? id;
}

function target(model, measure) {
  return model.targets.find((one) => one.name.startsWith(measure) && one.target_seconds)?.target_seconds ?? null;
}

function against(seconds, wanted) {
  if (seconds === null || seconds === undefined) return wanted ? h("div", {}, none(), h("small", {}, `target ${duration(wanted)}`)) : none();
  const tone = wanted === null ? "" : seconds <= wanted ? "ok" : "bad";
  return h("div", {}, h("span", { class: tone }, duration(seconds)), h("small", {}, wanted === null ? "no promise" : `of ${duration(wanted)}`));
}

function budget(model) {
  const known = model.targets.filter((one) => one.budget_left !== null);
  if (!model.targets.length) return none();
  if (!known.length) return h("small", { class: "dim" }, unjudged(model.targets));
  const worst = known.reduce((least, one) => (one.budget_left < least.budget_left ? one : least));
  const left = Math.max(0, Math.min(1, worst.budget_left));
  const tone = worst.budget_left <= 0 ? "bad" : worst.budget_left < 0.25 ? "warn" : "ok";
  return h("div", { title: promiseText(worst.promise) }, h("div", { class: "meter", role: "img", "aria-label": `${percent(worst.budget_left)} of the error budget left` }, h("i", { class: tone, style: { width: `${left * 100}%` } })), h("small", { class: tone === "ok" ? "" : tone }, worst.budget_left < 0 ? `overspent by ${percent(-worst.budget_left)}` : `${percent(worst.budget_left)} left`));
}

function none() {
  return brief(NONE, "none");
}

function rowActions(model) {
  const more = (event) => openMenu(event.currentTarget, `Actions for ${model.name}`, () => modelActions(findModel(model.name) ?? model, { openDrawer, openDeploy }));
  return h(
    "div",
    { class: "acts" },
    model.state === "ready" || model.state === "sleeping" ? button("Chat", () => go("chat", model.name), { class: "link", "aria-label": `Chat with ${model.name}` }) : button("Why", () => openDrawer(model.name), { class: "link", "aria-label": `Why ${model.name} does not answer` }),
    button("Logs", () => openDrawer(model.name, "logs"), { class: "link", "aria-label": `Logs of ${model.name}` }),
    button("⋯", more, { class: "more", "aria-label": `More actions for ${model.name}`, "aria-haspopup": "menu" }),
  );
}

function eventsCard() {
  const entries = state.journal.slice(-60).reverse();
  return card(
    "Events",
    null,
    entries.length
      ? h("ol", { class: "events" }, entries.slice(0, 12).map((one) => h("li", { key: one.number, class: `kind-${one.kind}` }, h("time", {}, clock(one.at)), h("span", {}, one.model && button(one.model, () => openDrawer(one.model), { class: "link strong" }), one.model ? " " : "", one.text))))
      : h("p", { class: "nodata" }, "Nothing happened since the daemon started."),
  );
}

