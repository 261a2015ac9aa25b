// Requests to the daemon this page came from, and to nowhere else.

const KEYS = { control: "aimgpu.token", model: "aimgpu.key" };

export function readKey(kind) {
  return sessionStorage.getItem(KEYS[kind]) ?? "";
}

export function writeKey(kind, value) {
  if (value) sessionStorage.setItem(KEYS[kind], value);
  else sessionStorage.removeItem(KEYS[kind]);
}

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, hint = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.hint = hint;
  }
}

function headers(kind) {
  const found = { "X-Aimgpu-Page": "1", "Content-Type": "application/json" };
  const key = readKey(kind);
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

async function send(method, path, body, { kind = "control", signal } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: headers(kind),
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The daemon does not answer.", { hint: "Is it running? `aimgpu doctor` looks for it." });
  }
  if (!response.ok) throw await readError(response);
  return response;
}

async function readError(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { status: response.status, code: error.code, hint: error.page_hint ?? error.hint });
  } catch {
    return new ApiError(`The daemon answered ${response.status}.`, { status: response.status });
  }
}

export async function api(method, path, body, options) {
  const response = await send(method, `/api/v1${path}`, body, options);
  return response.json();
}

export async function apiText(path) {
  return (await send("GET", `/api/v1${path}`)).text();
}

/** Calls `onEvent` for every line of a stream of JSON lines. */
export async function apiLines(path, body, onEvent, signal) {
  const response = await send("POST", `/api/v1${path}`, body, { signal });
  await readLines(response, (line) => line.trim() && onEvent(JSON.parse(line)));
}

export async function followText(path, onLine, signal) {
  const response = await send("GET", `/api/v1${path}`, undefined, { signal });
  await readLines(response, onLine);
}

/** One chat completion, streamed; `onDelta` gets text, the result is what the gateway said about it. */
export async function streamChat(body, onDelta, signal) {
  const began = performance.now();
  const response = await send("POST", "/v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, { kind: "model", signal });
  const result = {
    waitedMs: Number(response.headers.get("x-aimgpu-waited-ms")) || 0,
    instance: response.headers.get("x-aimgpu-instance"),
    firstMs: null,
    tokens: 0,
    ms: 0,
  };
  await readLines(response, (line) => {
    if (!line.startsWith("data: ") || line === "data: [DONE]") return;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new ApiError(event.error.message, { code: event.error.code });
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? choice?.delta?.reasoning_content;
    if (text) {
      result.firstMs ??= performance.now() - began;
      result.tokens += 1;
      onDelta(text);
    }
    if (event.usage?.completion_tokens) result.tokens = event.usage.completion_tokens;
  });
  result.ms = performance.now() - began;
  return result;
}

async function readLines(response, onLine) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(connectionLost);
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) onLine(line.replace(/\r$/, ""));
    if (done) break;
  }
  if (rest) onLine(rest);
}

function connectionLost(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError("The connection to the daemon was lost.", { hint: "What came before that is kept; try again." });
}

/** Server-sent events over fetch, because an EventSource cannot send a key. Closed while the tab is hidden. */
export function openEvents({ onEvent, onState }) {
  let attempt = 0;
  let controller = null;
  let timer = null;

  async function connect() {
    clearTimeout(timer);
    controller = new AbortController();
    const mine = controller;
    let event = "";
    try {
      const response = await send("GET", "/api/v1/events", undefined, { signal: mine.signal });
      await readLines(response, (line) => {
        if (line.startsWith("event: ")) event = line.slice(7);
        else if (line.startsWith("data: ")) {
          if (attempt || !live) onState("live", "");
          live = true;
          attempt = 0;
          onEvent(event, JSON.parse(line.slice(6)));
        }
      });
      if (mine === controller && !mine.signal.aborted) retry("The daemon closed the connection.");
    } catch (error) {
      if (mine !== controller || mine.signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        live = false;
        onState("refused", error.message);
        timer = setTimeout(connect, 10000);
      } else retry(error.message);
    }
  }
  let live = false;

  function retry(text) {
    live = false;
    attempt += 1;
    onState("lost", text);
    timer = setTimeout(connect, Math.min(8000, 500 * 2 ** Math.min(attempt, 4)) * (0.7 + Math.random() * 0.6));
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) timer = setTimeout(() => document.hidden && controller?.abort(), 30000);
    else if (!live || controller?.signal.aborted) {
      live = false;
      connect();
    }
  });
  addEventListener("aimgpu:key", () => {
    controller?.abort();
    live = false;
    connect();
  });
  connect();
}
