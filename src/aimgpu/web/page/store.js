// What the page knows, kept current by one stream of server-sent events; views subscribe by being rendered again.

import { api, openEvents } from "./api.js";
import { assignHues } from "./format.js";

export const state = {
  page: null,
  gpus: [],
  models: [],
  queue: { queue: {}, pressure: {} },
  requests: [],
  journal: [],
  history: [],
  session: { read: true, write: false, reason: null, keys_required: false },
  connection: "connecting", // connecting | live | lost | refused
  connectionText: "",
  route: readRoute(),
  drawer: null,
  writing: false, // the message is to have the focus once the chat is drawn
};

const MOST_REQUESTS = 500;
const MOST_SAMPLES = 720;
let scheduled = false;
let draw = () => {};
let noteNews = () => {};
let backlogRead = false; // what happened before this page connected is not news

export function onChange(callback) {
  draw = callback;
}

/** `callback` gets the entries of the journal that are new since the page connected. */
export function onNews(callback) {
  noteNews = callback;
}

/** Draw once in the next frame, however many things changed. */
export function changed() {
  if (scheduled) return;
  scheduled = true;
  const run = () => {
    scheduled = false;
    draw();
  };
  if (document.hidden) setTimeout(run, 250);
  else requestAnimationFrame(run);
}

export function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decodeURIComponent);
  return { view: parts[0] || "models", name: parts[1] ?? null, query: new URLSearchParams(query ?? "") };
}

export function go(view, name = null) {
  location.hash = `#/${view}${name ? `/${encodeURIComponent(name)}` : ""}`;
}

/** To write to this model: with the focus in the message. By a number key or a link the focus stays out of it, so that further keys switch views. */
export function openChat(name) {
  state.writing = true;
  go("chat", name);
  changed();
}

/** The facts of the cluster whose page this is; null on the page of one machine. */
export function cluster() {
  return state.page?.cluster ?? null;
}

export function findModel(name) {
  return state.models.find((model) => model.name === name) ?? null;
}

export function gpuIndex(id) {
  return state.gpus.find((gpu) => gpu.id === id)?.index ?? id;
}

/** A text of the daemon with GPUs as the commands name them: gpu0, gpu0/spx-0. Those of a cluster keep the names of their nodes. */
export function named(text) {
  if (!text || cluster()) return text;
  const ids = new Map(state.gpus.map((gpu) => [gpu.id, `gpu${gpu.index}`]));
  return text.replace(/[\w:.-]*[\w]/g, (word) => ids.get(word) ?? word);
}

const HANDLERS = {
  page: (body) => (state.page = body),
  gpus: (body) => (state.gpus = body),
  models: (body) => {
    state.models = body;
    assignHues(body.map((model) => model.name));
  },
  queue: (body) => (state.queue = body),
  history: (body) => (state.history = body),
  sample: (body) => (state.history = [...state.history, body].slice(-MOST_SAMPLES)),
  requests: (body) => (state.requests = merge(state.requests, body, MOST_REQUESTS)),
  journal: (body) => {
    const last = state.journal.at(-1)?.number ?? 0;
    const news = backlogRead ? body.filter((one) => one.number > last) : [];
    state.journal = merge(state.journal, body, MOST_REQUESTS);
    if (news.length) noteNews(news);
    backlogRead = true;
  },
};

function merge(known, added, most) {
  const last = known.length ? known[known.length - 1].number : 0;
  const restarted = added.length > 0 && added[added.length - 1].number < last - most;
  const fresh = restarted ? added : added.filter((one) => one.number > last);
  return [...(restarted ? [] : known), ...fresh].slice(-most);
}

export async function readSession() {
  try {
    state.session = await api("GET", "/session");
  } catch (error) {
    state.session = { read: false, write: false, reason: error.message, keys_required: true };
  }
  changed();
}

export function startLive() {
  openEvents({
    onEvent(name, body) {
      HANDLERS[name]?.(body);
      changed();
    },
    onState(connection, text) {
      if (state.connection !== connection && connection === "live") {
        state.requests = [];
        state.journal = [];
        backlogRead = false;
        readSession();
      }
      state.connection = connection;
      state.connectionText = text;
      changed();
    },
  });
}
