// What can be done with a model; the same list in the table, on the cards and in the drawer.

import { api, ApiError } from "./api.js";
import { h } from "./dom.js";
import { bytes } from "./format.js";
import { changed, cluster, go, state } from "./store.js";
import { button, complain, confirmFirst, copy, field, openDialog, problem, say } from "./ui.js";

/** Runs a write; where the daemon asks for a key, opens the dialog for it. */
export async function act(text, work) {
  try {
    await work();
    say(text);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) openKeys(error.message);
    else complain(error);
  }
  changed();
}

export function modelActions(model, { openDrawer, openDeploy }) {
  const cannot = state.session.write ? null : state.session.reason ?? "Changes need a key.";
  const asleep = model.state === "sleeping";
  const ready = model.state === "ready";
  const path = `/models/${encodeURIComponent(model.name)}`;
  return [
    { text: "Details", run: () => openDrawer(model.name) },
    { text: "Chat", run: () => go("chat", model.name) },
    { text: "Logs", run: () => openDrawer(model.name, "logs"), disabled: model.instances.length ? null : "Nothing runs" },
    { text: "Copy curl", run: () => copy(curl(model), "the curl command") },
    "-",
    { text: "Load", run: () => act(`${model.name} is loading.`, () => api("POST", `${path}/wake`, {})), disabled: cannot ?? (asleep ? null : "It is not asleep") },
    { text: "Sleep", run: () => act(`${model.name} is asleep.`, () => api("POST", `${path}/sleep`, {})), disabled: cannot ?? (ready ? null : "It is not loaded") },
    {
      text: model.pinned ? "Unpin" : "Pin",
      note: model.pinned ? "unload after 10 min idle" : "never unload",
      run: () => act(model.pinned ? `${model.name} is unloaded after 10 idle minutes.` : `${model.name} stays loaded.`, () => api("PATCH", path, model.pinned ? { keep: "10m" } : { pinned: true })),
      disabled: cannot,
    },
    ...["high", "medium", "low"].filter((one) => one !== model.priority).map((one) => ({ text: `Priority ${one}`, run: () => act(`${model.name} has priority ${one}.`, () => api("PATCH", path, { priority: one })), disabled: cannot })),
    { text: "Resize…", run: () => openResize(model, openDeploy), disabled: cannot ?? (ready ? null : "It is not loaded") },
    { text: "Edit…", run: () => openDeploy(model.name), disabled: cannot },
    "-",
    { text: "Unload", tone: "bad", run: () => askUnload(model), disabled: cannot },
  ];
}

export function askUnload(model) {
  confirmFirst({
    title: `Unload ${model.name}?`,
    text: `Requests in flight finish, then ${model.granted_bytes ? bytes(model.granted_bytes) : "what it holds"} is given back and the name stops answering.`,
    act: "Unload",
    run: () => act(`${model.name} is unloaded.`, () => api("POST", "/release", { names: [model.name] })),
  });
}

/** Where applications call; on a cluster the gateway's, not this page's. */
export function endpoint() {
  return cluster()?.endpoint ?? location.origin;
}

export function curl(model) {
  const body = JSON.stringify({ model: model.name, max_tokens: 100, messages: [{ role: "user", content: "Say hello" }] });
  const key = state.session.keys_required || cluster() ? ' -H "Authorization: Bearer $AIMGPU_KEY"' : "";
  return `curl ${endpoint()}/v1/chat/completions${key} -H 'Content-Type: application/json' -d '${body.replaceAll("'", "'\\''")}'`;
}

function openResize(model, openDeploy) {
  const form = { memory: Math.floor((model.granted_bytes / 2 ** 30) * 10) / 10, preview: null, error: null, turn: 0 };
  const size = () => Math.round(form.memory * 2 ** 30);
  const preview = async () => {
    form.turn += 1;
    const { turn } = form;
    let found = { preview: null, error: null };
    try {
      found.preview = await api("POST", "/resize?dry_run=1", { model: model.name, memory_bytes: size() });
    } catch (error) {
      found = { preview: null, error };
    }
    if (turn === form.turn) Object.assign(form, found); // an answer to what was typed since is under way
    changed();
  };
  const dialog = openDialog(
    (close) => [
      h("header", {}, h("h2", {}, `Resize ${model.name}`)),
      field("Memory for each copy, in GiB", h("input", { type: "number", min: "0.1", step: "0.1", value: form.memory, oninput: (event) => { form.memory = Number(event.target.value); preview(); } })),
      form.error && problem(form.error),
      form.preview && !form.error && h("p", { class: "notice" }, form.preview.changes.map((one) => h("span", { key: one.instance + one.partition, class: "block" }, `${one.partition}: ${bytes(one.before_bytes, { up: true })} now, ${bytes(one.used_bytes, { up: true })} of it in use; up to ${bytes(one.free_bytes)} possible.`)), h("small", {}, form.preview.note)),
      h("footer", {}, button("Cancel", close, { class: "quiet" }), cluster() && button("Edit instead…", () => { close(); openDeploy(model.name, { gpu: "memory", amount: `${form.memory}GiB` }); }, { class: "quiet" }), button("Resize", () => { close(); act(`${model.name} was resized.`, () => api("POST", "/resize", { model: model.name, memory_bytes: size() })); }, { class: "primary", disabled: !form.preview })),
    ],
    { label: `Resize ${model.name}` },
  );
  preview();
  return dialog;
}

export function openKeys(reason = null) {
  dispatchEvent(new CustomEvent("aimgpu:keys", { detail: reason }));
}
