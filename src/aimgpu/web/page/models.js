// The Model Manager: tiles, GPUs, models, who had the GPU, and what happened.

import { modelActions } from "./actions.js";
import { sparkline } from "./charts.js";
import { connectCard } from "./connect.js";
import { openDeploy } from "./deploy.js";
import { h } from "./dom.js";
import { openDrawer } from "./drawer.js";
import { ago, bytes, clock, duration, gib, hue, number, percent, promiseText, rate, shortModel, unjudged } from "./format.js";
import { gpuBar, gpuLegend, gpuTitle } from "./gpu_bars.js";
import { openLayout } from "./layout.js";
import { cluster, findModel, gpuIndex, named, openChat, state } from "./store.js";
import { timelineCard } from "./timeline.js";
import { brief, button, card, empty, level, openMenu, pill, unseen } from "./ui.js";

export function modelsView() {
  return [connectCard(), tiles(), gpusCard(), modelsCard(), h("div", { class: "two" }, timelineCard(60), eventsCard())];
}

function tiles() {
  const recent = state.history.slice(-60);
  const series = (key) => recent.map((sample) => Object.values(sample.models).reduce((sum, one) => sum + (one[key] ?? 0), 0));
  const traffic = state.models.map((model) => model.traffic).filter(Boolean);
  const sum = (key) => traffic.reduce((total, one) => total + (one[key] ?? 0), 0);
  const total = state.gpus.reduce((all, gpu) => all + gpu.memory_bytes, 0);
  const granted = state.gpus.reduce((all, gpu) => all + gpu.granted_bytes, 0);
  const running = sum("running");
  const kept = promisesKept();
  return h(
    "section",
    { class: "tiles", "aria-label": "Now" },
    tile("Requests per second", rate(series("rps").at(-1) ?? 0), sparkline(series("rps"), "var(--m1)", "Requests per second, last five minutes")),
    tile("Tokens per second", rate(series("tps").at(-1) ?? 0), sparkline(series("tps"), "var(--m3)", "Tokens per second, last five minutes")),
    tile("GPU memory granted", h("span", {}, gib(granted, { up: true }), h("small", {}, ` of ${gib(total)} GiB`)), h("p", {}, measuredText())),
    tile("Promises kept, 6 hours", h("span", { class: kept.tone }, kept.text), h("p", {}, kept.note)),
    tile("Requests now", h("span", {}, number(running), h("small", {}, " running")), h("p", {}, waitingNote(traffic))),
  );
}

/** A sum without a GPU that holds models and does not report its use would look as if they used nothing. */
function measuredText() {
  const known = state.gpus.filter((gpu) => gpu.measured_bytes !== null);
  if (!known.length) return state.gpus.every((gpu) => gpu.simulated) ? "a simulated GPU measures nothing" : "measured: the GPU does not report it";
  const silent = state.gpus.filter((gpu) => gpu.measured_bytes === null && gpu.granted_bytes).map((gpu) => gpu.index);
  if (silent.length) return `measured: gpu${silent.join(", gpu")} ${silent.length > 1 ? "do" : "does"} not report it`;
  return `measured ${gib(known.reduce((all, gpu) => all + gpu.measured_bytes, 0), { up: true })} GiB`;
}

function tile(name, value, below) {
  return h("div", { class: "tile" }, h("small", {}, name), h("div", { class: "big" }, value), below);
}

function promisesKept() {
  const all = state.models.flatMap((model) => model.targets.map((target) => ({ ...target, model: model.name })));
  const judged = all.filter((target) => target.attainment !== null);
  if (!judged.length) return { text: all.length ? "not yet" : "none", tone: "", note: all.length ? unjudged(all) : "nothing was promised" };
  const kept = judged.filter((target) => target.attainment >= target.target_part);
  const worst = judged.reduce((least, one) => (one.attainment - one.target_part < least.attainment - least.target_part ? one : least));
  return { text: `${kept.length} of ${judged.length}`, tone: kept.length === judged.length ? "ok" : "bad", note: `${kept.length === judged.length ? "tightest" : "worst"}: ${worst.model} ${worst.name.replace("_", " ")}, ${percent(worst.attainment, 1)}` };
}

/** "2 low, longest 1.2 s" */
function waitingNote(traffic) {
  const pressure = Object.values(state.queue.pressure ?? {});
  const longest = Math.max(...traffic.map((one) => one.longest_wait_seconds ?? 0), 0);
  const classes = ["high", "medium", "low"].map((name) => [name, traffic.reduce((all, one) => all + (one.waiting[name] ?? 0), 0)]).filter(([, count]) => count);
  const waiting = classes.length ? `${classes.map(([name, count]) => `${number(count)} ${name}`).join(", ")} waiting${longest ? `, longest ${duration(longest)}` : ""}` : "nothing waits";
  return pressure.length ? `${waiting}; ${pressure[0].reason}` : waiting;
}

export function gpusCard() {
  return card(
    "GPUs",
    h("span", { class: "hint", "aria-hidden": "true" }, h("b", { class: "swatch solid" }), "weights ", h("b", { class: "swatch kv" }), "KV cache ", h("b", { class: "swatch over" }), "overhead ", state.gpus.some((gpu) => gpu.measured_bytes !== null) && [h("b", { class: "swatch line" }), "measured"]),
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
      h("b", {}, `gpu${gpu.index}`),
      h("span", { class: "strong" }, gpu.name),
      unseen(", "),
      gpu.simulated && h("span", { class: "chip" }, gpu.software ? "software GPU" : "simulated", unseen(", ")),
      gpu.error && h("span", { class: "chip bad", title: gpu.error }, "cannot be read", unseen(", ")),
      h("span", { class: "dim" }, gpuTitle(gpu)),
      unseen(", "),
      h("span", { class: "grow" }),
      h("span", { class: "dim" }, memoryOf(gpu)),
      button("Layout…", () => openLayout(gpu), { class: "link", "aria-label": `Change the layout of gpu${gpu.index}` }),
    ),
    gpuBar(gpu, { onModel: openDrawer }),
    gpuLegend(gpu),
  );
}

/** "51.6 granted · 3.1 used by other processes · 137.4 free of 191.9 GiB", rounded as the commands do: what is taken up, what is free down. */
function memoryOf(gpu) {
  const unusable = gpu.memory_bytes - gpu.granted_bytes - gpu.foreign_bytes - gpu.free_bytes; // the rest of a partition that one model has alone
  const taken = [[gpu.granted_bytes, "granted"], [gpu.foreign_bytes, "used by other processes"], [unusable, "unusable"]].filter(([size], at) => size >= 2 ** 30 / 10 || !at);
  return `${[...taken.map(([size, name]) => `${gib(size, { up: true })} ${name}`), `${gib(gpu.free_bytes)} free`].join(" · ")} of ${gib(gpu.memory_bytes)} GiB`;
}

function modelsCard() {
  const aside = h("span", { class: "dim" }, state.models.length ? `${state.models.length} deployed` : "");
  if (!state.models.length) return card("Models", aside, noModels());
  const columns = COLUMNS.filter((one) => !one.wanted || state.models.some(one.wanted));
  return card(
    "Models",
    aside,
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "models" },
        h("thead", {}, h("tr", {}, columns.map(({ name }) => h("th", { key: name, scope: "col" }, name)), h("th", { key: "act", scope: "col" }, h("span", { class: "sr" }, "Actions")))),
        h("tbody", {}, state.models.map((model) => modelRow(model, columns))),
      ),
    ),
  );
}

function noModels() {
  const examples = [["A small one", "SmolLM2-135M"], ["A 7B for chat", "Qwen2.5-7B-Instruct"], ["One for code", "Coder"]];
  return empty(
    "No model is deployed yet",
    `Choose one to see what it needs and where it would go, before anything happens. From a terminal: \`aimgpu up --file stack.yaml${cluster() ? " --on kubernetes" : ""}\`.`,
    ...examples.map(([text, find]) => button(text, () => openDeploy(null, {}, { find }), { class: "quiet" })),
  );
}

/** `wanted`: a column that has nothing to show for any model is left out. */
const COLUMNS = [
  { name: "Model", props: { class: "first", role: "rowheader" }, cell: modelCell },
  { name: "State", cell: (model) => h("div", {}, pill(model.state, model.percent), stateNote(model), usedNotes(model).map((note) => h("small", { key: note }, note))) },
  { name: "Where", cell: places },
  { name: "Memory", props: { class: "num" }, cell: memoryCell },
  { name: "Traffic", props: { class: "num" }, cell: trafficCell },
  { name: "First token, p95", wanted: (model) => isTimed(model, "ttft"), props: { class: "num" }, cell: (model) => against(model, "ttft") },
  { name: "Per token, p95", wanted: (model) => isTimed(model, "tpot"), props: { class: "num" }, cell: (model) => against(model, "tpot") },
  { name: "Error budget", wanted: (model) => model.targets.length, cell: budget },
];

function modelRow(model, columns) {
  return h(
    "tr",
    { key: model.name, class: `state-${model.state}` },
    columns.map(({ name, props, cell }) => h("td", { key: name, "data-label": name === "Model" ? null : name, ...props }, cell(model))),
    h("td", { key: "act", class: "act" }, rowActions(model)),
  );
}

function modelCell(model) {
  return [
    button([h("b", { class: "swatch", style: { background: hue(model.name) } }), model.name], () => openDrawer(model.name), { class: "name" }),
    h("small", {}, shortModel(model.model)),
    h("small", {}, model.context ? brief(`${model.engine} · ${number(model.context)} × ${model.concurrency}`, `${model.engine}, context ${number(model.context)} tokens, ${model.concurrency} at once`) : model.engine),
    model.priority !== "medium" && h("small", { class: "tag" }, `${model.priority} priority`),
  ];
}

function memoryCell(model) {
  const sized = Boolean(model.planned_bytes) && model.planned_bytes !== model.granted_bytes && `${model.granted_bytes ? "sized" : "needs"} ${bytes(model.planned_bytes, { up: true })}`;
  return h(
    "div",
    {},
    model.granted_bytes ? `${gib(model.granted_bytes, { up: true })} GiB` : h("span", { class: "dim" }, "holds none"),
    model.granted_bytes && model.measured_bytes !== null ? h("small", {}, `${gib(model.measured_bytes, { up: true })} GiB measured`) : null,
    sized && h("small", {}, sized),
  );
}

function trafficCell({ traffic, program }) {
  if (program) return h("code", {}, program);
  if (!traffic) return h("span", { class: "dim" }, "no request yet");
  const waiting = Object.values(traffic.waiting).reduce((all, one) => all + one, 0);
  const busy = traffic.running || waiting || traffic.requests_per_second >= 0.05; // less would read as 0
  const slots = traffic.slots ? `${traffic.running} of ${traffic.slots} running` : "";
  const perSecond = rate(traffic.requests_per_second ?? 0);
  return h("div", {}, busy ? `${perSecond} request${perSecond === "1" ? "" : "s"}/s` : h("span", { class: "dim" }, "idle"), busy || waiting ? h("small", {}, [slots, waiting ? `${waiting} waiting` : ""].filter(Boolean).join(", ")) : null);
}

/** "used 2 min ago", "sleeps in 8 min" */
function usedNotes(model) {
  const used = model.last_used ? `used ${ago(model.last_used)}` : null;
  const leaves = model.program || model.pinned || model.state !== "ready" ? null : model.sleep_at ? `sleeps ${inTime(model.sleep_at)}` : `sleeps after ${duration(model.keep_seconds)} idle`;
  return [used, leaves].filter(Boolean);
}

function inTime(epoch) {
  return `in ${duration(Math.max(0, Math.round(epoch - Date.now() / 1000)))}`;
}

function stateNote(model) {
  if (model.state === "refused") return h("small", { class: "reason" }, named(model.reason), " ", button("what would fit?", () => openDeploy(model.name), { class: "link" }));
  if (model.state === "sleeping") return h("small", {}, model.instances[0]?.wake_seconds ? `wakes in about ${duration(model.instances[0].wake_seconds)}` : "a request wakes it");
  return model.reason && h("small", { class: `reason ${model.state === "failed" ? "bad" : ""}` }, named(model.reason));
}

function places(model) {
  const found = model.instances.flatMap((one) => one.places.map((place) => ({ ...place, replica: one.replica })));
  if (!found.length) return h("span", { class: "dim" }, "on no GPU");
  return h(
    "div",
    { class: "places" },
    found.slice(0, 3).map((place) => h("span", { key: `${place.gpu}${place.partition}${place.replica}` }, `gpu${gpuIndex(place.gpu)}/${place.partition} `, level(place.level, place.mechanism))),
    found.length > 3 && h("small", {}, `and ${found.length - 3} more`),
  );
}

function target(model, measure) {
  return model.targets.find((one) => one.name.startsWith(measure) && one.target_seconds) ?? null;
}

function measured(model, measure) {
  return model.traffic?.[`${measure}_p95_seconds`] ?? null;
}

function isTimed(model, measure) {
  return measured(model, measure) !== null || target(model, measure) !== null;
}

function against(model, measure) {
  const [seconds, wanted] = [measured(model, measure), target(model, measure)];
  const promised = wanted && duration(wanted.target_seconds);
  if (seconds === null) return h("span", { class: "dim" }, wanted ? `promised ${promised}` : "not measured");
  const judged = wanted && wanted.attainment !== null; // by too few requests it is neither kept nor broken
  return h("div", {}, h("span", { class: !judged ? "" : seconds <= wanted.target_seconds ? "ok" : "bad" }, duration(seconds)), wanted && h("small", {}, `of ${promised}`));
}

function budget(model) {
  const known = model.targets.filter((one) => one.budget_left !== null);
  if (!model.targets.length) return h("span", { class: "dim" }, "no promise");
  if (!known.length) return h("small", { class: "dim" }, unjudged(model.targets));
  const worst = known.reduce((least, one) => (one.budget_left < least.budget_left ? one : least));
  const left = Math.max(0, Math.min(1, worst.budget_left));
  const tone = worst.budget_left <= 0 ? "bad" : worst.budget_left < 0.25 ? "warn" : "ok";
  return h("div", { title: promiseText(worst.promise) }, h("div", { class: "meter", role: "img", "aria-label": `${percent(worst.budget_left)} of the error budget left` }, h("i", { class: tone, style: { width: `${left * 100}%` } })), h("small", { class: tone === "ok" ? "" : tone }, worst.budget_left < 0 ? `overspent by ${percent(-worst.budget_left)}` : `${percent(worst.budget_left)} left`));
}

function rowActions(model) {
  const more = (event) => openMenu(event.currentTarget, `Actions for ${model.name}`, () => modelActions(findModel(model.name) ?? model, { openDrawer, openDeploy }));
  return h(
    "div",
    { class: "acts" },
    model.program ? null : model.state === "ready" || model.state === "sleeping" ? button("Chat", () => openChat(model.name), { class: "link", "aria-label": `Chat with ${model.name}` }) : button("Why", () => openDrawer(model.name), { class: "link", "aria-label": `Why ${model.name} does not answer` }),
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
      ? h("ol", { class: "events" }, entries.slice(0, 12).map((one) => h("li", { key: one.number, class: `kind-${one.kind}` }, h("time", {}, clock(one.at)), h("span", {}, one.model && button(one.model, () => openDrawer(one.model), { class: "link strong" }), one.model ? " " : "", named(one.text)))))
      : h("p", { class: "nodata" }, "Nothing happened since the daemon started."),
  );
}

