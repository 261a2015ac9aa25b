// Everything about one model: sizing, why it is where it is, what happened to it, its log and its stack entry.

import { modelActions } from "./actions.js";
import { api, apiLines, followText } from "./api.js";
import { lineChart } from "./charts.js";
import { openDeploy } from "./deploy.js";
import { h, prose } from "./dom.js";
import { bytes, clock, duration, hue, number, percent, promiseText, rate, sentence, unjudged } from "./format.js";
import { changed, cluster, findModel, gpuIndex, named, state } from "./store.js";
import { button, card, copy, drawLayers, field, level, moveByArrows, openDialog, pill, problem, say } from "./ui.js";
import { waterfall } from "./waterfall.js";

const TABS = [["overview", "Overview"], ["sizing", "Sizing"], ["placement", "Placement"], ["promises", "Promises"], ["history", "History"], ["logs", "Logs"], ["stack", "Stack entry"]];
const MOST_LINES = 2000;

export function openDrawer(name, tab = "overview") {
  const drawer = { name, tab, detail: null, error: null, seen: null, log: [], logOf: null, filter: "", stop: null, follow: true };
  const dialog = openDialog((close) => drawerView(drawer, close), { label: `Model ${name}`, side: true, onClose: () => { drawer.stop?.abort(); state.drawer = null; changed(); } });
  state.drawer = drawer;
  if (tab === "logs") followLog(drawer);
  return dialog;
}

/** Again whenever the model has another state, share or copy: why it is where it is has changed then. */
async function loadIfChanged(drawer, model) {
  const seen = [model.state, model.granted_bytes, ...model.instances.map((one) => one.id)].join();
  if (seen === drawer.seen) return;
  drawer.seen = seen;
  let found = { detail: drawer.detail, error: null };
  try {
    found.detail = await api("GET", `/models/${encodeURIComponent(drawer.name)}`);
  } catch (error) {
    found = { detail: null, error };
  }
  if (seen === drawer.seen) Object.assign(drawer, found);
  drawLayers();
}

function drawerView(drawer, close) {
  const model = findModel(drawer.name);
  if (model) loadIfChanged(drawer, model);
  const choose = (tab) => () => {
    drawer.tab = tab;
    if (tab === "logs") followLog(drawer);
    drawLayers();
  };
  return [
    h(
      "header",
      {},
      h("b", { class: "swatch", style: { background: hue(drawer.name) } }),
      h("h2", {}, drawer.name),
      model && pill(model.state, model.percent),
      h("span", { class: "grow" }),
      model && button("Actions", (event) => openMenuAbove(event, model, close), { class: "quiet", "aria-haspopup": "menu" }),
      button("✕", close, { class: "more", "aria-label": "Close" }),
    ),
    h("div", { class: "tabs", role: "tablist", "aria-label": "About this model", onkeydown: moveByArrows }, TABS.map(([id, text]) => button(text, choose(id), { key: id, role: "tab", "aria-selected": drawer.tab === id ? "true" : "false", tabindex: drawer.tab === id ? "0" : "-1", class: drawer.tab === id ? "on" : "" }))),
    h("div", { class: "body", role: "tabpanel", "aria-label": TABS.find(([id]) => id === drawer.tab)[1], key: drawer.tab }, model ? PANELS[drawer.tab](drawer, model) : h("p", { class: "nodata" }, "This model is not deployed any more.")),
  ];
}

/** A menu cannot show above a modal dialog, so the drawer offers the actions as a dialog of its own. */
function openMenuAbove(event, model, close) {
  const items = modelActions(model, { openDrawer: (name, tab) => { close(); openDrawer(name, tab); }, openDeploy: (name) => { close(); openDeploy(name); } }).filter((item) => item !== "-" && item.text !== "Details");
  openDialog(
    (done) => [
      h("header", {}, h("h2", {}, `Actions for ${model.name}`)),
      h("div", { class: "actionList" }, items.map((item) => button([item.text, item.note && h("small", {}, item.note), item.disabled && h("small", {}, item.disabled)], () => { done(); if (item.text === "Chat" || item.text === "Logs") close(); item.run(); }, { key: item.text, class: item.tone ?? "quiet", disabled: Boolean(item.disabled) }))),
    ],
    { label: `Actions for ${model.name}` },
  );
}

const PANELS = {
  overview: (_, model) => overview(model),
  sizing: (drawer, model) => sizing(drawer, model),
  placement: (drawer, model) => placement(drawer, model),
  promises: (_, model) => promises(model),
  history: (_, model) => history(model),
  logs: (drawer, model) => logs(drawer, model),
  stack: (drawer) => stackEntry(drawer),
};

function overview(model) {
  const facts = [
    ["Model", model.model],
    ["Also called", [...(model.aliases ?? []), model.default && "(by callers that name no model)"].filter(Boolean).join(", ")],
    ["Engine", model.engine],
    ["Precision", model.precision],
    ["Context × requests at once", model.context ? `${number(model.context)} × ${model.concurrency}` : String(model.concurrency)],
    ["Asked for", model.gpu],
    ["Priority", model.priority],
    ["Isolation demanded", model.isolation === "none" ? "not demanded" : model.isolation],
    ["Kept loaded", model.pinned ? "always" : `${duration(model.keep_seconds)} after the last request`],
    ["Granted", model.granted_bytes ? bytes(model.granted_bytes, { up: true }) : "nothing"],
    ["Of that", model.unused],
    ["Measured", !model.granted_bytes ? null : model.measured_bytes !== null ? bytes(model.measured_bytes, { up: true }) : isSimulated(model) ? null : "the device does not report it"],
  ];
  return [
    model.reason && h("p", { class: `notice ${model.state === "failed" || model.state === "refused" ? "bad" : ""}` }, named(model.reason)),
    h("dl", { class: "facts" }, facts.filter(([, value]) => value).map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value)))),
    h("h3", {}, "Copies"),
    h(
      "ul",
      { class: "copies" },
      model.instances.map((one) =>
        h("li", { key: one.id }, h("code", {}, one.id), pill(one.state, one.percent), one.places.map((place) => h("span", { key: place.gpu + place.partition }, `gpu${gpuIndex(place.gpu)}/${place.partition} · ${bytes(place.memory_bytes, { up: true })} `, level(place.level, place.mechanism))), one.load_seconds && h("small", {}, `loads in ${duration(one.load_seconds)}`), one.reason && h("p", { class: "bad" }, named(one.reason)), one.last_lines.length ? h("pre", { tabindex: "0" }, one.last_lines.join("\n")) : null),
      ),
      !model.instances.length && h("li", {}, "None runs."),
    ),
    charts(model),
  ];
}

function isSimulated(model) {
  const ids = new Set(model.instances.flatMap((one) => one.places.map((place) => place.gpu)));
  return state.gpus.some((gpu) => ids.has(gpu.id) && gpu.simulated);
}

function charts(model) {
  const samples = state.history.slice(-180);
  const times = samples.map((one) => one.at);
  const of = (key) => samples.map((one) => one.models[model.name]?.[key] ?? (key === "rps" || key === "tps" ? 0 : null));
  return [
    h("h3", {}, "Traffic"),
    lineChart({ times, label: "Tokens per second", format: (value) => rate(value), lines: [{ name: "tokens/s", colour: hue(model.name), values: of("tps") }] }),
    h("h3", {}, "Latency, p95"),
    lineChart({ times, label: "Latency", format: (value) => duration(value), lines: [{ name: "first token", colour: "var(--m1)", values: of("ttft") }, { name: "whole answer", colour: "var(--m2)", values: of("latency") }] }),
  ];
}

function sizing(drawer, model) {
  if (drawer.error) return problem(drawer.error);
  if (!drawer.detail) return h("p", { class: "nodata" }, "Reading…");
  const { footprint } = drawer.detail;
  if (!footprint) return h("p", { class: "nodata" }, "This model is neither in the catalogue nor on disk, so it cannot be sized. It has the memory that was asked for.");
  return [
    waterfall(footprint, model.granted_bytes || null, model.measured_bytes),
    h("h3", {}, "How each term was computed"),
    h("ul", { class: "formulas" }, footprint.terms.map((term) => h("li", { key: term.name }, h("b", {}, term.name.replace("_", " ")), h("code", {}, term.formula), h("small", {}, Object.entries(term.inputs).map(([key, value]) => `${key} = ${value}`).join(", ")), h("em", {}, term.exactness)))),
    footprint.notes.map((note) => h("p", { key: note, class: "dim small" }, note)),
    Object.keys(footprint.flags).length ? [h("h3", {}, "Engine flags that keep it there"), h("pre", { tabindex: "0" }, Object.entries(footprint.flags).map(([key, value]) => `${key} ${value}`).join("\n"))] : null,
  ];
}

function placement(drawer) {
  if (drawer.error) return problem(drawer.error);
  if (!drawer.detail) return h("p", { class: "nodata" }, "Reading…");
  const found = drawer.detail.explanations;
  if (!found.length) return h("p", { class: "nodata" }, "Nothing of it is on a GPU now.");
  return found.map((one) =>
    h(
      "div",
      { key: one.instance, class: "explained" },
      h("h3", {}, one.instance),
      one.facts.map((fact) => h("p", { key: fact }, named(fact))),
      one.decision && h("p", { class: one.decision.placed ? "" : "notice bad" }, named(sentence(one.decision.because ?? one.decision.summary))),
      one.decision?.would_fit?.length ? [h("h3", {}, "It would fit with one of these"), h("ul", {}, one.decision.would_fit.map((each) => h("li", { key: each }, named(each))))] : null,
      h("ul", { class: "devices" }, one.devices.map((each) => h("li", { key: each.device_id, class: String(each.verdict).replace(" ", "-") }, h("b", {}, named(each.device_id)), h("em", {}, each.verdict), h("span", {}, named(each.text)), each.loss !== null && each.loss !== undefined && h("small", {}, `cost to later models: ${number(each.loss)} ‰ of a GPU`)))),
      one.left_out ? h("p", { class: "dim small" }, `and ${number(one.left_out)} more GPUs`) : null,
      one.note && h("p", { class: "dim small" }, one.note),
    ),
  );
}

export function promises(model) {
  if (!model.targets.length) return h("div", { class: "empty" }, h("p", {}, prose("Nothing was promised to its callers. In a stack file: `slo: {ttft_p95: 500ms}`.")), addPromise(model));
  return h(
    "div",
    { class: "promises" },
    model.targets.map((target) => promise(target)),
  );
}

function promise(target) {
  const left = target.budget_left;
  const kept = target.attainment;
  const tone = kept === null ? "dim" : kept >= target.target_part ? "ok" : "bad";
  const judged = kept !== null || left !== null;
  const burns = [["burn 5 min", target.fast_burn], ["burn 1 hour", target.slow_burn]].filter(([, value]) => value !== null);
  return h(
    "div",
    { key: `${target.class}${target.name}`, class: "promise" },
    h("div", {}, h("b", {}, promiseText(target.promise || target.name)), target.class !== "all" && h("small", { class: "tag" }, target.class)),
    h("div", { class: "burn" }, h("div", { class: "meter tall", role: "img", "aria-label": `Error budget left: ${percent(left)}` }, h("i", { class: left === null ? "" : left <= 0 ? "bad" : left < 0.25 ? "warn" : "ok", style: { width: `${Math.max(0, Math.min(1, left ?? 1)) * 100}%` } }), h("span", {}, left === null ? unjudged([target]) : left < 0 ? `overspent by ${percent(-left)}` : `${percent(left)} of the budget left`))),
    judged && h("dl", { class: "mini" }, kept !== null && h("div", { key: "kept" }, h("dt", {}, "kept"), h("dd", { class: tone }, percent(kept, 2))), burns.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", { class: value > 1 ? "warn" : "" }, `${rate(value)}×`))), left !== null && burns.length > 0 && h("div", { key: "lasts" }, h("dt", {}, "budget lasts"), h("dd", {}, lasts(target)))),
  );
}

/** At the present rate; the budget is that of six hours. */
function lasts(target) {
  const burn = target.slow_burn ?? target.fast_burn;
  if (target.budget_left === null || burn === null || burn === undefined) return "–";
  if (target.budget_left <= 0) return "spent";
  return burn <= 0 ? "untouched" : duration((target.budget_left * 6 * 3600) / burn);
}

function history(model) {
  const entries = state.journal.filter((one) => one.model === model.name).slice(-100).reverse();
  if (!entries.length) return h("p", { class: "nodata" }, "Nothing happened to it since the daemon started.");
  return h("ol", { class: "events" }, entries.map((one) => h("li", { key: one.number, class: `kind-${one.kind}` }, h("time", {}, clock(one.at)), h("span", {}, named(one.text)))));
}

async function followLog(drawer) {
  const model = findModel(drawer.name);
  const instance = model?.instances.find((one) => one.id === drawer.logOf) ?? model?.instances[0];
  if (!instance || (drawer.logOf === instance.id && drawer.stop && !drawer.stop.signal.aborted)) return;
  drawer.stop?.abort();
  drawer.stop = new AbortController();
  drawer.logOf = instance.id;
  drawer.log = [];
  try {
    await followText(`/instances/${encodeURIComponent(instance.id)}/log?follow=1&lines=400`, (line) => {
      drawer.log.push(line);
      if (drawer.log.length > MOST_LINES) drawer.log.splice(0, drawer.log.length - MOST_LINES);
      scheduleLog();
    }, drawer.stop.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      drawer.log.push(`— ${error.message}`);
      drawLayers();
    }
  }
}

let logTimer = null;
function scheduleLog() {
  logTimer ??= setTimeout(() => {
    logTimer = null;
    drawLayers();
    const box = document.querySelector(".log");
    if (box && state.drawer?.follow) box.scrollTop = box.scrollHeight;
  }, 60);
}

function logs(drawer, model) {
  const wanted = drawer.filter.toLowerCase();
  const lines = wanted ? drawer.log.filter((line) => line.toLowerCase().includes(wanted)) : drawer.log;
  return [
    h(
      "div",
      { class: "row" },
      model.instances.length > 1 && h("select", { value: drawer.logOf, "aria-label": "Copy", onchange: (event) => { drawer.logOf = event.target.value; drawer.stop?.abort(); followLog(drawer); } }, model.instances.map((one) => h("option", { key: one.id, value: one.id }, one.id))),
      h("input", { type: "search", placeholder: "Find in the log", "aria-label": "Find in the log", value: drawer.filter, oninput: (event) => { drawer.filter = event.target.value; drawLayers(); } }),
      h("label", { class: "check" }, h("input", { type: "checkbox", checked: drawer.follow, onchange: (event) => { drawer.follow = event.target.checked; } }), "follow"),
      h("span", { class: "grow" }),
      button("Copy", () => copy(lines.join("\n"), "the log"), { class: "quiet" }),
    ),
    h("pre", { class: "log", tabindex: "0", "aria-label": "Log of the engine" }, lines.length ? lines.join("\n") : model.instances.length ? "The engine has written nothing yet." : "Nothing runs."),
  ];
}

function stackEntry(drawer) {
  if (!drawer.detail) return h("p", { class: "nodata" }, "Reading…");
  return [h("div", { class: "row" }, h("p", { class: "dim grow" }, "As it would stand in a stack file."), button("Copy", () => copy(drawer.detail.stack, "the stack entry"), { class: "quiet" })), h("pre", { tabindex: "0" }, drawer.detail.stack)];
}

const BUDGET = "The error budget is the part of the requests that may miss the promise within six hours: 5 of 100 where 95 % is promised. Burn is how fast it goes: at 1× it lasts just those six hours, at 2× three. A promise is judged from ten requests on.";

export function promisesView() {
  const promised = state.models.filter((model) => model.targets.length);
  const others = state.models.filter((model) => !model.targets.length);
  const pressure = Object.entries(state.queue.pressure ?? {});
  return [
    pressure.length ? h("p", { class: "notice warn" }, pressure.map(([gpu, one]) => named(`${gpu}: ${one.reason}`)).join(" · ")) : null,
    promised.length ? h("p", { class: "lead" }, BUDGET) : null,
    promised.map((model) => card(h("span", { key: model.name }, button(model.name, () => openDrawer(model.name, "promises"), { class: "link strong" })), pill(model.state), promises(model), burnDown(model))),
    others.length ? card("Without a promise", null, h("ul", { class: "others pad" }, others.map((model) => h("li", { key: model.name }, button(model.name, () => openDrawer(model.name), { class: "link strong" }), addPromise(model))))) : null,
    !state.models.length && card("Promises", null, h("div", { class: "empty" }, h("strong", {}, "No model is deployed"), h("p", {}, "Promise a model's callers how fast it answers, and this page shows whether that is kept."), button("Deploy a model", () => openDeploy(), { class: "primary" }))),
  ];
}

function addPromise(model) {
  return button("Add a promise", () => openPromise(model), { class: "quiet", disabled: !state.session.write, title: state.session.reason, "aria-label": `Add a promise to ${model.name}` });
}

/** With what is measured now, so that what is promised can be kept. */
function openPromise(model) {
  const form = { ttft_p95: "", tpot_p95: "", error: null };
  const wanted = () => Object.fromEntries(["ttft_p95", "tpot_p95"].map((key) => [key, form[key].trim()]).filter(([, value]) => value));
  const input = (key, placeholder) => h("input", { type: "text", value: form[key], placeholder, autocomplete: "off", autofocus: key === "ttft_p95", oninput: (event) => { form[key] = event.target.value; drawLayers(); } });
  const now = (seconds) => (seconds === null || seconds === undefined ? "Not measured yet." : `Now ${duration(seconds)}.`);
  const promise = async (close) => {
    try {
      const { fields } = await api("GET", `/models/${encodeURIComponent(model.name)}`);
      await applyFields(model.name, { ...fields, slo: { ...fields.slo, ...wanted() } });
      say(`${model.name} has a promise.`);
      close();
    } catch (error) {
      form.error = error;
    }
    changed();
  };
  openDialog(
    (close) => [
      h("header", {}, h("h2", {}, `Promise the callers of ${model.name}`)),
      h("form", { onsubmit: (event) => { event.preventDefault(); promise(close); } },
        field("First token within, for 95 % of requests", input("ttft_p95", "500ms"), now(model.traffic?.ttft_p95_seconds)),
        field("Each further token within", input("tpot_p95", "50ms"), now(model.traffic?.tpot_p95_seconds)),
        form.error && problem(form.error),
        h("p", { class: "dim small" }, `It costs nothing: the latency is measured, and shown against the promise.${cluster() ? "" : " Nothing is restarted."}`),
        h("footer", {}, button("Cancel", close, { class: "quiet" }), h("button", { type: "submit", class: "primary", disabled: !Object.keys(wanted()).length }, "Promise"))),
    ],
    { label: `Add a promise to ${model.name}` },
  );
}

async function applyFields(name, fields) {
  let failed = null;
  const stack = JSON.stringify({ models: { [cluster() ? name.split("/").pop() : name]: fields } });
  await apiLines("/apply", { stack, base_directory: null, namespace: cluster()?.models[name] ?? null }, (event) => {
    if (event.event === "error") failed = Object.assign(new Error(event.message ?? event.text), { hint: event.page_hint ?? event.hint });
    else if (event.event === "plan" && event.refusals?.length) failed = new Error(event.refusals[0].summary);
  });
  if (failed) throw failed;
}

/** What was left of the tightest budget in each sample, and the first token against its promise. */
function burnDown(model) {
  const samples = state.history.slice(-720);
  const times = samples.map((one) => one.at);
  const target = model.targets.find((one) => one.target_seconds && one.name.startsWith("ttft"));
  const first = samples.map((one) => one.models[model.name]?.ttft ?? null);
  return h(
    "div",
    { class: "three pad" },
    h("div", {}, h("h3", {}, "Error budget left, the tightest promise"), lineChart({ times, most: 1, label: "Error budget left", format: (value) => percent(value), lines: [{ name: "budget left", colour: hue(model.name), values: samples.map((one) => one.budget?.[model.name] ?? null) }] })),
    target ? h("div", {}, h("h3", {}, "First token, p95 of each sample"), lineChart({ times, label: "First token p95", format: (value) => duration(value), lines: [{ name: "first token p95", colour: hue(model.name), values: first }, { name: "promised", colour: "var(--dim)", dashed: true, values: times.map(() => target.target_seconds) }] })) : null,
    h("div", {}, h("h3", {}, "Requests per second"), lineChart({ times, label: "Requests per second", format: (value) => rate(value), lines: [{ name: "requests", colour: hue(model.name), values: samples.map((one) => one.models[model.name]?.rps ?? 0) }] })),
  );
}
