// Chat with one or several models side by side. Conversations stay in this tab; nothing is stored anywhere.

import { openKeys } from "./actions.js";
import { streamChat } from "./api.js";
import { openDeploy } from "./deploy.js";
import { h, prose } from "./dom.js";
import { duration, hue, plural, rate } from "./format.js";
import { markdown } from "./markdown.js";
import { changed, state } from "./store.js";
import { announce, button, copy, empty, field, pill } from "./ui.js";

const MOST_PANES = 4;
const SPEAK_MS = 1000;
const QUESTIONS = ["What is a GPU? Answer in one sentence.", "Write a Python function that reverses a string.", "List three uses of a small model."];
const chat = { panes: [], draft: "", system: "", settings: false, temperature: 0.7, maxTokens: 512, shown: null };
let paneCount = 0;

function addPane(model) {
  paneCount += 1;
  chat.panes = [...chat.panes, { id: paneCount, model, messages: [], stop: null }].slice(-MOST_PANES);
}

export function chatView() {
  const names = state.models.filter((model) => !model.program && model.state !== "failed" && model.state !== "refused").map((model) => model.name);
  if (!names.length) return empty("No model to chat with", "Deploy one first; it answers here as soon as it is ready.", button("Deploy a model", () => openDeploy(), { class: "primary" }));
  if (state.route.name && state.route.name !== chat.shown) {
    chat.shown = state.route.name;
    if (!chat.panes.some((pane) => pane.model === chat.shown) && names.includes(chat.shown)) {
      if (chat.panes.length === 1 && !chat.panes[0].messages.length) chat.panes = [];
      addPane(chat.shown);
    }
  }
  if (!chat.panes.length) addPane(names[0]);
  const busy = chat.panes.some((pane) => pane.stop);
  return h(
    "div",
    { class: `chat n${chat.panes.length}` },
    h("div", { class: "panes" }, chat.panes.map((pane) => paneView(pane, names))),
    h(
      "form",
      { class: "composer", onsubmit: (event) => { event.preventDefault(); ask(); } },
      chat.settings && settings(),
      h("textarea", { key: "message", class: "message", rows: "2", "aria-label": "Message", placeholder: chat.panes.length > 1 ? `Ask all ${chat.panes.length} models` : `Ask ${chat.panes[0].model}`, value: chat.draft, oninput: (event) => { chat.draft = event.target.value; }, onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); } } }),
      h(
        "div",
        { class: "row" },
        names.length > 1 && chat.panes.length < MOST_PANES && button("+ Compare", () => { addPane(names.find((name) => !chat.panes.some((pane) => pane.model === name)) ?? names[0]); changed(); }, { class: "quiet" }),
        button(chat.system.trim() ? "Settings · system prompt" : "Settings", () => { chat.settings = !chat.settings; changed(); }, { class: "quiet", "aria-expanded": chat.settings ? "true" : "false" }),
        h("span", { class: "grow" }),
        button("Clear", () => { stopAll(); chat.panes.forEach((pane) => { pane.messages = []; }); changed(); }, { class: "quiet" }),
        busy ? button("Stop", stopAll, { class: "primary stop" }) : h("button", { class: "primary", type: "submit" }, "Send"),
      ),
    ),
  );
}

function settings() {
  return h(
    "div",
    { key: "settings", class: "settings" },
    field("System prompt", h("textarea", { rows: "2", value: chat.system, placeholder: "You answer in one sentence.", oninput: (event) => { chat.system = event.target.value; changed(); } })),
    h("div", { class: "row" }, h("label", { class: "inline" }, "temperature", h("input", { type: "number", min: "0", max: "2", step: "0.1", value: chat.temperature, oninput: (event) => { chat.temperature = Number(event.target.value); } })), h("label", { class: "inline" }, "at most", h("input", { type: "number", "aria-label": "At most this many tokens", min: "1", max: "32768", value: chat.maxTokens, oninput: (event) => { chat.maxTokens = Number(event.target.value); } }), "tokens")),
  );
}

function paneView(pane, names) {
  const model = state.models.find((one) => one.name === pane.model);
  return h(
    "section",
    { key: pane.id, class: "pane card", "aria-label": `Chat with ${pane.model}` },
    h(
      "header",
      {},
      h("b", { class: "swatch", style: { background: hue(pane.model) } }),
      h("select", { value: pane.model, "aria-label": "Model", onchange: (event) => { pane.model = event.target.value; changed(); } }, names.map((name) => h("option", { key: name, value: name }, name))),
      model && pill(model.state, model.percent),
      h("span", { class: "grow" }),
      pane.stop && chat.panes.length > 1 && button("Stop", () => pane.stop.abort(), { class: "link", "aria-label": `Stop the answer of ${pane.model}` }),
      chat.panes.length > 1 && button("✕", () => { pane.stop?.abort(); chat.panes = chat.panes.filter((one) => one !== pane); changed(); }, { class: "more", "aria-label": `Close the chat with ${pane.model}` }),
    ),
    h(
      "div",
      { class: "messages", role: "log", "aria-live": "off", "aria-label": `Conversation with ${pane.model}`, tabindex: "0" },
      pane.messages.length ? pane.messages.map((message, at) => messageView(message, at)) : firstQuestions(model),
    ),
  );
}

function firstQuestions(model) {
  return h(
    "div",
    { key: "first", class: "ideasToAsk" },
    h("p", { class: "dim" }, model?.state === "sleeping" ? "It is asleep. Your first message wakes it." : "Ask something, for example:"),
    QUESTIONS.map((text) => button(text, () => { chat.draft = text; ask(); }, { key: text, class: "quiet" })),
  );
}

function messageView(message, at) {
  const text = message.role === "user" ? h("p", { class: "text" }, message.content) : h("div", { class: "markdown" }, message.content ? readAnswer(message) : message.busy ? h("p", {}, "…") : null);
  const tools = message.role === "assistant" && !message.busy && message.content && button("Copy", () => copy(message.content, "the answer"), { class: "link", "aria-label": "Copy the answer" });
  return h("div", { key: at, class: `message ${message.role}` }, text, message.error && h("p", { class: "notice bad" }, prose(message.error)), h("div", { class: "below" }, message.facts && h("small", {}, message.facts), tools));
}

/** Read once for each length that it is drawn at, not for each drawing. */
function readAnswer(message) {
  if (message.read?.content !== message.content) message.read = { content: message.content, found: markdown(message.content, (code) => button("Copy", () => copy(code, "the code"), { class: "link", "aria-label": "Copy the code" })) };
  return message.read.found;
}

function ask() {
  const text = chat.draft.trim();
  if (!text || chat.panes.some((pane) => pane.stop)) return;
  chat.draft = "";
  const box = document.querySelector(".composer textarea.message");
  if (box) box.value = "";
  for (const pane of chat.panes) askOne(pane, text);
  changed();
}

async function askOne(pane, text) {
  pane.messages.push({ role: "user", content: text });
  const history = pane.messages.filter((one) => !one.error && one.content).map(({ role, content }) => ({ role, content }));
  if (chat.system.trim()) history.unshift({ role: "system", content: chat.system.trim() });
  const answer = { role: "assistant", content: "", busy: true, error: null, facts: null };
  const speaker = speakOf(pane);
  pane.messages.push(answer);
  pane.stop = new AbortController();
  try {
    const body = { model: pane.model, messages: history, temperature: chat.temperature, max_tokens: chat.maxTokens };
    const found = await streamChat(body, (delta) => { answer.content += delta; speaker(answer.content); scroll(pane); changed(); }, pane.stop.signal);
    const decode = found.firstMs !== null && found.ms > found.firstMs ? found.tokens / ((found.ms - found.firstMs) / 1000) : null;
    answer.facts = [found.waitedMs ? `waited ${duration(found.waitedMs / 1000)}` : null, `first token ${duration(found.firstMs === null ? null : found.firstMs / 1000)}`, plural(found.tokens, "token"), decode ? `${rate(decode)} tokens/s` : null].filter(Boolean).join(" · ");
  } catch (error) {
    if (error.name === "AbortError") answer.facts = "stopped";
    else {
      answer.error = error.hint ? `${error.message} ${error.hint}` : error.message;
      if (error.status === 401) openKeys(error.message);
    }
  }
  answer.busy = false;
  speaker(answer.content, answer.error ?? answer.facts ?? "");
  pane.stop = null;
  scroll(pane);
  changed();
}

/** To screen readers sentence by sentence, each once: the log itself, read again at every token, could not be followed. */
function speakOf(pane) {
  let spoken = 0;
  let last = 0; // one that follows at once would take the place of the one before
  return (content, end = null) => {
    const wait = Math.max(0, last + SPEAK_MS - Date.now());
    if (end === null && wait) return;
    const rest = content.slice(spoken);
    const text = end === null ? rest.match(/^[\s\S]{60,}[.!?:](?=\s)|^[\s\S]{60,}\n/)?.[0] : `${rest} ${end}`;
    if (!text?.trim()) return;
    const who = spoken === 0 || chat.panes.length > 1 ? `${pane.model}: ` : "";
    spoken += text.length;
    last = Date.now();
    setTimeout(() => announce(`${who}${text.trim()}`), wait);
  };
}

function scroll(pane) {
  const boxes = document.querySelectorAll(".messages");
  const box = boxes[chat.panes.indexOf(pane)];
  if (box && box.scrollHeight - box.scrollTop - box.clientHeight < 120) requestAnimationFrame(() => { box.scrollTop = box.scrollHeight; });
}

function stopAll() {
  for (const pane of chat.panes) pane.stop?.abort();
}
