// Requests as they end, and the path of one of them.

import { api } from "./api.js";
import { lineChart } from "./charts.js";
import { h } from "./dom.js";
import { bytes, clock, duration, hue, number, rate } from "./format.js";
import { changed, state } from "./store.js";
import { timelineCard } from "./timeline.js";
import { button, card, openDialog } from "./ui.js";

const prompts = new Map(); // by request, as they were looked at in this tab
const RANGES = [[60, "1 minute"], [300, "5 minutes"], [1800, "30 minutes"], [3600, "1 hour"]];
const range = { seconds: 300 };
const filter = { model: "", outcome: "", most: innerWidth < 700 ? 25 : 200 }; // a card takes the height of five rows

export function activityView() {
  const choose = h("label", { class: "inline" }, "the last", h("select", { value: String(range.seconds), "aria-label": "Time range", onchange: (event) => { range.seconds = Number(event.target.value); changed(); } }, RANGES.map(([seconds, text]) => h("option", { key: seconds, value: String(seconds) }, text))));
  return [h("div", { class: "row" }, h("span", { class: "grow" }), choose), chartsCard(), timelineCard(range.seconds, { tall: true }), requestsCard()];
}

function chartsCard() {
  const since = (state.history.at(-1)?.at ?? 0) - range.seconds;
  const samples = state.history.filter((one) => one.at >= since);
  const times = samples.map((one) => one.at);
  const names = [...new Set(samples.flatMap((one) => Object.keys(one.models)))].slice(0, 8);
  const of = (name, key, absent) => samples.map((one) => one.models[name]?.[key] ?? absent);
  const memory = state.gpus.flatMap((gpu) => [
    { name: `gpu${gpu.index} granted`, colour: `var(--m${(gpu.index % 8) + 1})`, values: samples.map((one) => one.gpus[gpu.id]?.granted ?? null) },
    !gpu.simulated && { name: `gpu${gpu.index} measured`, colour: `var(--m${(gpu.index % 8) + 1})`, dashed: true, values: samples.map((one) => one.gpus[gpu.id]?.measured ?? null) },
  ]).filter(Boolean);
  return h(
    "div",
    { class: "three" },
    card("Memory", null, lineChart({ times, label: "Memory", latest: true, scale: 2 ** 30, format: (value) => bytes(value, { up: true }), lines: memory.slice(0, 8) })),
    card("Throughput", h("span", { class: "dim" }, "tokens per second"), lineChart({ times, label: "Tokens per second", format: (value) => rate(value), lines: names.map((name) => ({ name, colour: hue(name), values: of(name, "tps", 0) })) })),
    card("Latency", h("span", { class: "dim" }, "p95, whole answer"), lineChart({ times, label: "Latency", format: (value) => duration(value), lines: names.map((name) => ({ name, colour: hue(name), values: of(name, "latency", null) })) })),
  );
}

function requestsCard() {
  const found = state.requests.filter(wanted);
  const rows = found.slice(-filter.most).reverse();
  const models = [...new Set(state.requests.map((one) => one.model))].sort();
  const aside = h(
    "span",
    { class: "row" },
    h("select", { value: filter.model, "aria-label": "Model", onchange: (event) => { filter.model = event.target.value; changed(); } }, h("option", { value: "" }, "all models"), models.map((name) => h("option", { key: name, value: name }, name))),
    h("select", { value: filter.outcome, "aria-label": "Outcome", onchange: (event) => { filter.outcome = event.target.value; changed(); } }, [["", "any outcome"], ["failed", "failed"], ["ok", "answered"], ["waited", "waited"]].map(([value, text]) => h("option", { key: value, value }, text))),
  );
  if (!state.requests.length) return card("Requests", aside, h("p", { class: "nodata" }, `No request has ended since the daemon started. ${keptText()}`));
  const columns = REQUEST_COLUMNS.filter((one) => !one.wanted || rows.some(one.wanted));
  return card(
    "Requests",
    aside,
    h("div", { class: "scroll" }, h("table", { class: "requests" }, h("thead", {}, h("tr", {}, columns.map(({ name }) => h("th", { key: name, scope: "col" }, name)))), h("tbody", {}, rows.map((one) => requestRow(one, columns))))),
    found.length > rows.length && h("div", { class: "row pad" }, button(`Show ${Math.min(100, found.length - rows.length)} more`, () => { filter.most += 100; changed(); }, { class: "quiet" })),
    h("p", { class: "dim small pad" }, `${keptText()} The list holds the last 500 requests of this tab.`),
  );
}

function keptText() {
  const kept = state.page?.prompts_kept;
  return kept ? `Prompts of the last ${kept} requests are kept in memory; answers never are.` : "Prompts and answers are not kept.";
}

function wanted(one) {
  if (filter.model && one.model !== filter.model) return false;
  if (filter.outcome === "ok") return one.status < 400;
  if (filter.outcome === "failed") return one.status >= 400;
  if (filter.outcome === "waited") return one.queued_seconds > 0.01;
  return true;
}

function decodeRate(one) {
  if (!one.streamed || !one.tokens || one.first_byte_seconds === null || one.seconds <= one.first_byte_seconds) return null;
  return one.tokens / (one.seconds - one.first_byte_seconds);
}

/** `wanted`: a column that has nothing to show for any request is left out. */
const REQUEST_COLUMNS = [
  { name: "Time", cell: (one) => button(clock(one.ended), () => openPath(one), { class: "link", "aria-label": `Path of request ${one.number}, ended ${clock(one.ended)}` }) },
  { name: "Model", cell: (one) => [h("b", { class: "swatch", style: { background: hue(one.model) } }), one.model] },
  { name: "Outcome", cell: outcome },
  { name: "Caller", cell: (one) => one.caller },
  { name: "Class", cell: (one) => one.priority },
  { name: "Queued", cell: (one) => duration(one.queued_seconds) },
  { name: "First token", wanted: (one) => one.streamed, cell: (one) => (one.streamed ? duration(one.first_byte_seconds) : null) },
  { name: "Tokens", wanted: (one) => one.tokens !== null, cell: (one) => (one.tokens === null ? null : number(one.tokens)) },
  { name: "Tokens/s", wanted: (one) => decodeRate(one) !== null, cell: (one) => (decodeRate(one) === null ? null : rate(decodeRate(one))) },
  { name: "Total", cell: (one) => duration(one.seconds) },
];

/** Only what failed is marked: a column of green would hide it. */
function outcome(one) {
  if (one.status < 400) return h("span", { class: "dim" }, "answered");
  const gone = one.status === 499;
  return [h("span", { class: `pill ${gone ? "dim" : "bad"}` }, gone ? "caller left" : `failed ${one.status}`), one.code && h("small", {}, one.code)];
}

/** A click anywhere in the row opens the path; by keyboard the time does. */
function requestRow(one, columns) {
  const open = (event) => { if (!event.target.closest("button") && !String(getSelection())) openPath(one); };
  return h(
    "tr",
    { key: one.number, class: "opens", onclick: open },
    columns.map(({ name, cell }) => {
      const shown = cell(one);
      return h("td", { key: name, "data-label": name, class: shown === null ? "num blank" : "num" }, shown);
    }),
  );
}

/** Queued, woken, first token, last token, and the neighbours that made way meanwhile. */
function openPath(one) {
  if (state.page?.prompts_kept) readPrompt(one);
  openDialog((close) => pathView(one, close), { label: "Path of a request", wide: true });
}

async function readPrompt(one) {
  prompts.set(one.number, { text: "reading…" });
  try {
    const { prompt } = await api("GET", `/requests/${one.number}/prompt`);
    prompts.set(one.number, { text: prompt ?? "not kept any more" });
  } catch (error) {
    prompts.set(one.number, { text: error.message });
  }
  changed();
}

function pathView(one, close) {
  const arrived = one.ended - one.seconds;
  const sent = one.instance ? arrived + one.queued_seconds : null;
  const first = one.first_byte_seconds === null ? null : arrived + one.first_byte_seconds;
  const woken = one.queued_seconds < 0.2 ? [] : state.journal.filter((entry) => entry.model === one.model && entry.kind === "state" && entry.text.startsWith("ready") && entry.at >= arrived - 0.5 && entry.at <= (sent ?? one.ended) + 1.5);
  const steps = [
    { name: one.instance ? (woken.length ? "Queued while the model was woken" : "Queued") : "Queued, never sent", from: arrived, to: sent ?? one.ended, tone: "wait" },
    sent && { name: one.streamed ? "Prefill: the engine reads the prompt" : "The engine works", from: sent, to: first ?? one.ended, tone: "prefill" },
    first && one.streamed && { name: `Decode: ${number(one.tokens)} tokens`, from: first, to: one.ended, tone: "decode" },
  ].filter(Boolean);
  const neighbours = state.requests.filter((other) => other.number !== one.number && other.ended >= arrived && other.ended - other.seconds <= one.ended);
  const yielded = neighbours.filter((other) => other.recalls > 0);
  const held = neighbours.filter((other) => other.queued_seconds > 0.01 && other.model !== one.model);
  return [
    h("header", {}, h("h2", {}, `Request ${one.number} to ${one.model}`), h("span", { class: "grow" }), button("✕", close, { class: "more", "aria-label": "Close" })),
    h("p", { class: "dim" }, `${clock(arrived, true)} · status ${one.status}${one.code ? ` (${one.code})` : ""} · ${one.priority} · ${one.caller}${one.instance ? ` · ${one.instance}` : ""}`),
    h("div", { class: "path" }, steps.map((step) => h("div", { key: step.name, class: "step" }, h("span", {}, step.name), h("div", { class: "track" }, h("i", { class: step.tone, style: { left: `${((step.from - arrived) / one.seconds) * 100}%`, width: `${Math.max(0.6, ((step.to - step.from) / one.seconds) * 100)}%` } })), h("em", {}, duration(step.to - step.from))))),
    prompts.has(one.number) && [h("h3", { key: "ph" }, "Prompt"), h("pre", { key: "p", class: "prompt" }, prompts.get(one.number).text)],
    h("h3", {}, "Neighbours meanwhile"),
    h(
      "ul",
      {},
      one.recalls > 0 && h("li", { class: "warn" }, `It gave its slot back ${one.recalls} ${one.recalls === 1 ? "time" : "times"} to something more urgent.`),
      yielded.map((other) => h("li", { key: `y${other.number}` }, `${other.model} request ${other.number} yielded its slot ${other.recalls}×.`)),
      held.slice(0, 8).map((other) => h("li", { key: `h${other.number}` }, `${other.model} request ${other.number} (${other.priority}) waited ${duration(other.queued_seconds)}.`)),
      !one.recalls && !yielded.length && !held.length && h("li", { class: "dim" }, "Nobody else waited or yielded."),
    ),
  ];
}
