// What can be done with a model; the same list in the table, on the cards and in the drawer.

import { api, ApiError } from "./api.js";
import { h } from "./dom.js";
import { bytes, gib } from "./format.js";
import { changed, cluster, openChat, state } from "./store.js";
import { announceOnce, button, complain, confirmFirst, copy, field, openDialog, problem, say } from "./ui.js";

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
  if (model.program) {
    return [
      { text: "Details", run: () => openDrawer(model.name) },
      { text: "Logs", run: () => openDrawer(model.name, "logs"), disabled: model.instances.length ? null : "Nothing runs" },
      { text: "Resize…", run: () => openResize(model), disabled: cannot ?? (model.state === "running" ? null : "It does not run") },
      "-",
      { text: "Stop", run: () => askStop(model), disabled: cannot },
    ];
  }
  return [
    { text: "Details", run: () => openDrawer(model.name) },
    { text: "Chat", run: () => openChat(model.name) },
    { text: "Logs", run: () => openDrawer(model.name, "logs"), disabled: model.instances.length ? null : "Nothing runs" },
    { text: "Copy curl", run: () => copy(curl(model), "the curl command") },
    "-",
    { text: "Wake", run: () => act(`${model.name} is loading.`, () => api("POST", `${path}/wake`, {})), disabled: cannot ?? (asleep ? null : "It is not asleep") },
    { text: "Sleep", run: () => act(`${model.name} is asleep.`, () => api("POST", `${path}/sleep`, {})), disabled: cannot ?? (ready ? null : "It is not loaded") },
    {
      text: model.pinned ? "Unpin" : "Pin",
      note: model.pinned ? "sleep after 10 min idle" : "never sleep",
      run: () => act(model.pinned ? `${model.name} sleeps after 10 idle minutes.` : `${model.name} stays loaded.`, () => api("PATCH", path, model.pinned ? { keep: "10m" } : { pinned: true })),
      disabled: cannot,
    },
    ...["high", "medium", "low"].filter((one) => one !== model.priority).map((one) => ({ text: `Priority ${one}`, run: () => act(`${model.name} has priority ${one}.`, () => api("PATCH", path, { priority: one })), disabled: cannot })),
    { text: "Resize…", run: () => openResize(model), disabled: cannot ?? (ready || cluster() ? null : "It is not loaded") },
    { text: "Edit…", run: () => openDeploy(model.name), disabled: cannot },
    "-",
    { text: "Stop", run: () => askStop(model), disabled: cannot },
  ];
}

export function askStop(model) {
  confirmFirst({
    title: `Stop ${model.name}?`,
    text: `Requests in flight finish, then ${model.granted_bytes ? bytes(model.granted_bytes) : "what it holds"} is given back and the name stops answering.`,
    act: "Stop",
    run: () => act(`${model.name} is stopped.`, () => api("POST", "/release", { names: [model.name] })),
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

/** On a cluster its pods are replaced; on one machine the share changes while the model runs. */
function openResize(model) {
  const copies = Math.max(1, model.instances.filter((one) => one.places.length).length);
  const now = (model.granted_bytes || model.planned_bytes || 2 ** 30) / copies;
  const shown = Number(gib(now, { up: true }));
  const form = { memory: shown, preview: null, error: null, turn: 0 };
  const size = () => (form.memory === shown ? Math.round(now) : Math.round(form.memory * 2 ** 30)); // as it is, to the byte
  const preview = async () => {
    form.turn += 1;
    const { turn } = form;
    let found = { preview: null, error: null };
    try {
      found.preview = await api("POST", "/resize?dry_run=1", { model: model.name, memory_bytes: size() });
    } catch (error) {
      found = { preview: null, error };
    }
    if (turn === form.turn) {
      Object.assign(form, found); // else an answer to what was typed since is under way
      if (found.preview) announceOnce(form, found.preview.note);
    }
    changed();
  };
  const done = () => (form.preview?.rollout?.restarts ? `${model.name} is being restarted with its new share.` : `${model.name} was resized.`);
  const dialog = openDialog(
    (close) => [
      h("header", {}, h("h2", {}, `Resize ${model.name}`)),
      field("Memory for each copy, in GiB", h("input", { type: "number", min: "0.1", step: "0.1", value: form.memory, oninput: (event) => { form.memory = Number(event.target.value); preview(); } })),
      form.error && problem(form.error),
      form.preview && !form.error && h("p", { class: "notice" }, form.preview.changes.map((one) => h("span", { key: one.instance + one.partition, class: "block" }, shareNow(one))), h("small", {}, form.preview.note)),
      h("footer", {}, button("Cancel", close, { class: "quiet" }), button(form.preview?.rollout?.restarts ? "Restart with this share" : "Resize", () => { close(); act(done(), () => api("POST", "/resize", { model: model.name, memory_bytes: size() })); }, { class: "primary", disabled: !form.preview || form.preview.rollout?.changed === false })),
    ],
    { label: `Resize ${model.name}` },
  );
  preview();
  return dialog;
}

/** "gpu0/cpx-3: 10 GiB now, 8.2 GiB of it in use; up to 24 GiB possible." */
function shareNow(one) {
  const used = one.used_bytes === null ? "" : `, ${bytes(one.used_bytes, { up: true })} of it in use`;
  const most = one.free_bytes === null ? "" : `; up to ${bytes(one.free_bytes)} possible`;
  return `${one.partition}: ${bytes(one.before_bytes, { up: true })} now${used}${most}.`;
}

export function openKeys(reason = null) {
  dispatchEvent(new CustomEvent("aimgpu:keys", { detail: reason }));
}
