// Who was served when, and who waited: turns from the gateway's signals, waits from the queue and the launch gate.

import { api } from "./api.js";
import { h } from "./dom.js";
import { clock, duration, hue, percent } from "./format.js";
import { changed, state } from "./store.js";
import { button, card } from "./ui.js";

const timeline = { data: null, seconds: 60, wanted: false, timer: null, paused: false, gpu: null };

async function refreshTimeline() {
  timeline.timer = null;
  if (!timeline.wanted || document.hidden || state.connection !== "live") return schedule();
  timeline.wanted = false;
  if (!timeline.paused) {
    try {
      timeline.data = await api("GET", `/timeline?seconds=${timeline.seconds}`);
      changed();
    } catch {
      // the connection banner says it
    }
  }
  return schedule();
}

function schedule() {
  timeline.timer ??= setTimeout(refreshTimeline, 1500);
}

export function timelineCard(seconds, { tall = false } = {}) {
  if (!timeline.data || timeline.seconds !== seconds) {
    timeline.seconds = seconds;
    timeline.wanted = true;
    if (!timeline.timer) timeline.timer = setTimeout(refreshTimeline, timeline.data ? 200 : 0);
  } else {
    timeline.wanted = true;
    schedule();
  }
  const choices = state.gpus.length > 1 ? h("select", { value: timeline.gpu ?? "", "aria-label": "GPU", onchange: (event) => { timeline.gpu = event.target.value || null; changed(); } }, h("option", { value: "" }, "all GPUs"), state.gpus.map((gpu) => h("option", { key: gpu.id, value: gpu.id }, `gpu${gpu.index}`))) : null;
  const pause = button(timeline.paused ? "Resume" : "Pause", () => { timeline.paused = !timeline.paused; changed(); }, { class: "link" });
  return card(`Who had the GPU, last ${duration(seconds)}`, h("span", { class: "row" }, choices, pause), lanes(tall));
}

function lanes(tall) {
  const { data } = timeline;
  if (!data) return h("p", { class: "nodata" }, "Reading…");
  const span = data.now - data.since;
  const at = (time) => Math.max(0, Math.min(100, ((time - data.since) / span) * 100));
  const onGpu = new Map(state.models.map((model) => [model.name, new Set(model.instances.flatMap((one) => one.places.map((place) => place.gpu)))]));
  const shown = (name) => !timeline.gpu || onGpu.get(name)?.has(timeline.gpu);
  const names = [...new Set([...state.models.map((model) => model.name), ...data.turns.map((turn) => turn.model), ...data.waits.map((wait) => wait.model)])].filter(shown);
  const active = names.filter((name) => tall || data.turns.some((turn) => turn.model === name) || data.waits.some((wait) => wait.model === name));
  const picked = (active.length ? active : names).slice(0, tall ? 40 : 7);
  if (!picked.length) return h("p", { class: "nodata" }, "No model is deployed.");
  return h(
    "div",
    { class: "lanes" },
    picked.map((name) => lane(name, data, at)),
    h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, ""), h("div", {}, h("span", {}, clock(data.since)), h("span", {}, clock(data.now)))),
    h("p", { class: "legend", "aria-hidden": "true" }, h("span", {}, h("b", { class: "solid" }), "served"), h("span", {}, h("b", { class: "hatch" }), "waited in the queue"), h("span", {}, h("b", { class: "gate" }), "launches held back at the gate")),
  );
}

function lane(name, data, at) {
  const turns = data.turns.filter((turn) => turn.model === name);
  const waits = data.waits.filter((wait) => wait.model === name);
  const model = state.models.find((one) => one.name === name);
  const instances = new Set((model?.instances ?? []).map((one) => one.id));
  const gate = data.gate.flatMap((sample) => Object.entries(sample.gate).filter(([id]) => instances.has(id)).map(([id, part]) => ({ id, part, at: sample.at })));
  const busy = turns.reduce((sum, turn) => sum + turn.ended - turn.began, 0);
  const waited = waits.reduce((sum, wait) => sum + Math.max(0, wait.ended - wait.began), 0);
  const text = `${name}: served ${duration(busy)}, waited ${duration(waited)}`;
  return h(
    "div",
    { key: name, class: "lane" },
    h("span", { title: name }, name),
    h(
      "div",
      { role: "img", "aria-label": text, title: text },
      turns.map((turn, index) => h("i", { key: `t${index}`, style: { left: `${at(turn.began)}%`, width: `${Math.max(0.25, at(turn.ended) - at(turn.began))}%`, background: hue(name) }, title: `served ${duration(turn.ended - turn.began)} from ${clock(turn.began, true)}` })),
      waits.map((wait) => h("i", { key: `w${wait.number}`, class: `hatch ${wait.sent ? "" : "never"}`, style: { left: `${at(wait.began)}%`, width: `${Math.max(0.25, at(wait.ended) - at(wait.began))}%`, "--c": hue(name) }, title: `a ${wait.priority} request waited ${duration(wait.ended - wait.began)}${wait.recalls ? `, its slot was taken back ${wait.recalls} times` : ""}${wait.sent ? "" : ", and was refused"}` })),
      gate.map((one, index) => h("i", { key: `g${index}`, class: "gate", style: { left: `${at(one.at) - 1}%`, width: "1%", opacity: String(Math.min(1, 0.25 + one.part)) }, title: `launches waited ${percent(one.part)} of the time for more urgent work` })),
    ),
  );
}
