// How a program reaches the models: the address, and what each client wants to be told, ready to paste.

import { curl, endpoint } from "./actions.js";
import { h } from "./dom.js";
import { changed, cluster, state } from "./store.js";
import { button, card, copy } from "./ui.js";

const CLIENTS = [
  ["curl", "In a terminal", curl],
  ["Python", "With OpenAI's package: pip install openai", python],
  ["Open WebUI", "In a terminal; or in Open WebUI under Settings, Connections, add this address and key", openWebUi],
  ["Claude Code", "In a terminal; it needs a model with a long context", claudeCode],
];
const shown = { client: null, model: null };

/** Null on a cluster without a gateway: there nothing answers under one address. */
export function connectCard() {
  if (cluster() && !cluster().endpoint) return null;
  const models = state.models.filter((model) => model.state !== "failed" && model.state !== "refused");
  const model = models.find((one) => one.name === shown.model) ?? models[0] ?? null;
  const url = `${endpoint()}/v1`;
  const client = model && CLIENTS.find(([name]) => name === shown.client);
  return card(
    "Use these models",
    h("span", { class: "dim" }, keyText()),
    h(
      "div",
      { class: "connect pad" },
      h("div", { class: "row" }, h("code", { class: "url" }, url), button("Copy URL", () => copy(url, "the address"), { class: "quiet" })),
      model && h("div", { class: "row" }, h("span", { class: "dim small" }, "Copy for"), CLIENTS.map(([name, , write]) => button(name, () => { shown.client = name; changed(); copy(write(model), `the lines for ${name}`); }, { key: name, class: "quiet", "aria-label": `Copy for ${name}`, "aria-pressed": client?.[0] === name ? "true" : "false" })), models.length > 1 && h("label", { class: "inline" }, "model", h("select", { value: model.name, onchange: (event) => { shown.model = event.target.value; changed(); } }, models.map((one) => h("option", { key: one.name, value: one.name }, one.name))))),
    ),
    client && h("div", { class: "connect pad shown" }, h("p", { class: "dim small" }, `${client[1]}:`), h("pre", { tabindex: "0" }, client[2](model))),
  );
}

function keyText() {
  return keysNeeded() ? "OpenAI's, Anthropic's and Ollama's API, with an API key" : "OpenAI's, Anthropic's and Ollama's API; no key needed on this machine";
}

function keysNeeded() {
  return state.session.keys_required || Boolean(cluster());
}

function key() {
  return keysNeeded() ? "YOUR-KEY" : "none";
}

function python(model) {
  return `from openai import OpenAI

client = OpenAI(base_url="${endpoint()}/v1", api_key="${key()}")
answer = client.chat.completions.create(
    model="${model.name}",
    messages=[{"role": "user", "content": "Say hello"}],
)
print(answer.choices[0].message.content)`;
}

function openWebUi() {
  return `OPENAI_API_BASE_URL=${endpoint()}/v1 OPENAI_API_KEY=${key()} open-webui serve`;
}

function claudeCode(model) {
  return `ANTHROPIC_BASE_URL=${endpoint()} ANTHROPIC_AUTH_TOKEN=${key()} ANTHROPIC_MODEL=${model.name} ANTHROPIC_SMALL_FAST_MODEL=${model.name} claude`;
}
