// The shell: navigation, connection, keys, and which view is shown.

import { activityView } from "./activity.js";
import { readKey, writeKey } from "./api.js";
import { chatView } from "./chat.js";
import { openDeploy } from "./deploy.js";
import { h, prose, render } from "./dom.js";
import { openDrawer, promisesView } from "./drawer.js";
import { gpusCard, modelsView } from "./models.js";
import { changed, cluster, go, named, onChange, onNews, readRoute, readSession, startLive, state } from "./store.js";
import { announce, button, closeMenu, drawLayers, field, openDialog, openMenu, say, unseen } from "./ui.js";
import { openStack, whatIfView } from "./what_if.js";

const VIEWS = [["models", "Models"], ["chat", "Chat"], ["activity", "Activity"], ["promises", "Promises"], ["what-if", "What if"]];
const DRAW = { models: modelsView, chat: chatView, activity: activityView, promises: promisesView, "what-if": whatIfView, gpus: () => gpusCard() };
const THEMES = ["auto", "light", "dark"];

function shell() {
  const view = DRAW[state.route.view] ? state.route.view : "models";
  return [
    h(
      "header",
      { class: "top" },
      h("a", { class: "brand", href: "#/models" }, "AIM GPU Sharing"),
      state.page?.simulated.length ? h("span", { class: "chip sim", title: state.page.software ? "A driver that needs no card: limits hold for programs that use it; the models run on the CPU" : "The ledger and the models are real; the GPUs are simulated and enforce nothing" }, `${state.page.software ? "software GPU" : "simulated"} ${state.page.simulated.join(", ")}`) : null,
      h("nav", { "aria-label": "Views" }, VIEWS.map(([id, text]) => h("a", { key: id, href: `#/${id}`, class: view === id ? "on" : "", "aria-current": view === id ? "page" : null }, text))),
      h("span", { class: "grow" }),
      connection(),
      button("Export stack", openStack, { class: "quiet", title: "The stack file for what is deployed" }),
      button("Deploy a model", () => openDeploy(), { class: "primary" }),
      button("⋯", openMore, { class: "more", "aria-label": "More", "aria-haspopup": "menu" }),
    ),
    h("main", { id: "content", tabindex: "-1", class: `view-${view}` }, h("h1", { class: "sr" }, VIEWS.find(([id]) => id === view)?.[1] ?? "GPUs"), banner(), state.page || state.connection === "lost" || state.connection === "refused" ? (state.page ? DRAW[view]() : unreachable()) : h("p", { class: "nodata" }, "Connecting…")),
    h("footer", { class: "foot" }, state.page ? `aimgpu ${state.page.version} · ${state.page.node}` : "", h("span", { class: "grow" }), unseen(". "), h("span", {}, "Press ? for keys")),
  ];
}

function connection() {
  const text = { live: "live", connecting: "connecting", lost: "connection lost", refused: "key needed" }[state.connection];
  return h("span", { class: `connection ${state.connection}`, role: "status", title: state.connectionText || null }, h("i", { class: "dot", "aria-hidden": "true" }), state.connection === "lost" ? null : unseen("Connection:"), text);
}

function banner() {
  const notes = [...(state.page?.notes ?? [])];
  return [
    state.connection === "lost" && state.page ? h("p", { key: "lost", class: "notice bad", role: "alert" }, h("strong", {}, "The daemon does not answer."), h("small", {}, prose("What you see is what was last known. The page connects again by itself; if the daemon ended, start it with `aimgpu up`."))) : null,
    state.page?.device_error ? h("p", { key: "device", class: "notice bad", role: "alert" }, h("strong", {}, "GPUs cannot be read"), h("small", {}, state.page.device_error)) : null,
    notes.map((note) => h("p", { key: note, class: "notice warn" }, note)),
  ];
}

function unreachable() {
  const refused = state.connection === "refused";
  return h(
    "div",
    { class: "empty tallEmpty" },
    h("strong", {}, refused ? "This daemon asks for its token" : "The daemon does not answer"),
    h("p", {}, prose(refused ? state.connectionText : "Start it with `aimgpu up`; this page connects by itself.")),
    refused && button("Enter the token", () => openKeyDialog(null), { class: "primary" }),
  );
}

function openKeyDialog(reason) {
  const form = { control: readKey("control"), model: readKey("model") };
  let notice = reason;
  const save = async (close) => {
    const [control, model] = [form.control.trim(), form.model.trim()];
    if (!/^[!-~]*$/.test(control + model)) {
      notice = "A key has letters, digits and signs of ASCII only, and no spaces. Copy it again.";
      return drawLayers();
    }
    writeKey("control", control);
    writeKey("model", model);
    close();
    dispatchEvent(new Event("aimgpu:key"));
    await readSession();
    if (control && !cluster() && !state.session.write) say(`The token was not accepted. ${state.session.reason ?? ""}`, "bad");
  };
  const secret = (key, label) => h("input", { type: "password", autocomplete: "off", "aria-label": label, value: form[key], oninput: (event) => { form[key] = event.target.value; } });
  openDialog(
    (close) => [
      h("header", {}, h("h2", {}, "Keys of this tab")),
      notice && h("p", { class: "notice warn", role: "alert" }, prose(notice)),
      h(
        "form",
        { onsubmit: (event) => { event.preventDefault(); save(close); } },
        tokenField(secret),
        field("API key, for chat", secret("model", "API key"), `From \`aimgpu keys add NAME${cluster() ? " --on kubernetes" : ""}\`, where keys are asked for.`),
        h("p", { class: "dim small" }, "Kept until this tab is closed, and sent to the server of this page only."),
        h("footer", {}, button("Cancel", close, { class: "quiet" }), h("button", { type: "submit", class: "primary" }, "Use")),
      ),
    ],
    { label: "Keys" },
  );
}

function tokenField(secret) {
  if (!cluster()) return field("Daemon's token, for changes", secret("control", "Daemon's token"), "The file `token` in the daemon's home (~/.local/state/aimgpu or $AIMGPU_HOME), readable by its user.");
  if (cluster().own_rights) return h("p", { class: "dim small" }, "Changes are made with the rights of your kubeconfig.");
  return field("Kubernetes token, for changes and logs", secret("control", "Kubernetes token"), "`kubectl create token ACCOUNT` prints one. Changes are made with its rights, not with those of this page's pod.");
}

function theme() {
  return localStorage.getItem("aimgpu.theme") ?? "auto";
}

function openMore(event) {
  openMenu(event.currentTarget, "More", () => [
    { text: "Stack file", run: openStack },
    { text: "Keys…", note: "for changes and for chat", run: () => openKeyDialog(null) },
    { text: `Theme: ${theme()}`, run: nextTheme },
    { text: "Keyboard", run: openShortcuts },
    cluster() ? null : { text: "Metrics", run: () => location.assign("/metrics") },
  ]);
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  localStorage.setItem("aimgpu.theme", next);
  applyTheme();
  changed();
}

function applyTheme() {
  if (theme() === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme();
}

const SHORTCUTS = [["1 – 5", "switch the view"], ["d", "deploy a model"], ["/", "write a message in the chat"], ["?", "this list"], ["Esc", "close what is open"]];

function openShortcuts() {
  openDialog((close) => [h("header", {}, h("h2", {}, "Keyboard"), h("span", { class: "grow" }), button("Close", close, { class: "quiet" })), h("dl", { class: "facts" }, SHORTCUTS.map(([key, text]) => h("div", { key }, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text))))], { label: "Keyboard" });
}

function onKey(event) {
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key >= "1" && event.key <= String(VIEWS.length)) go(VIEWS[Number(event.key) - 1][0]);
  else if (event.key === "d") openDeploy();
  else if (event.key === "?") openShortcuts();
  else if (event.key === "/") {
    go("chat");
    state.writing = true;
  } else return;
  event.preventDefault();
}

function drawPage() {
  render(document.getElementById("app"), shell());
  drawLayers();
  const box = state.writing && document.querySelector(".composer textarea.message"); // not yet there while the models are read
  if (box) {
    box.focus();
    state.writing = false;
  }
  const waiting = state.models.reduce((sum, model) => sum + (model.state === "failed" || model.state === "refused" ? 1 : 0), 0);
  document.title = `${state.page?.simulated.length ? state.page.software ? "SOFTWARE GPU · " : "SIMULATED · " : ""}${waiting ? `(${waiting}) ` : ""}AIM GPU Sharing`;
}

addEventListener("hashchange", () => {
  closeMenu();
  state.route = readRoute();
  if (state.route.view !== "chat") state.writing = false;
  changed();
  document.getElementById("content")?.focus({ preventScroll: true });
});
addEventListener("keydown", onKey);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part after # is the view
  document.getElementById("content")?.focus();
});
addEventListener("aimgpu:keys", (event) => openKeyDialog(event.detail));
applyTheme();
onChange(drawPage);
onNews((entries) => announce(entries.slice(-3).map((one) => `${one.model ? `${one.model}: ` : ""}${named(one.text)}`).join(". ")));
drawPage();
readSession();
startLive();
if (state.route.view === "model" && state.route.name) openDrawer(state.route.name);
setInterval(changed, 5000);
