// Pieces that several views use: pills, dialogs, menus, short messages.

import { h, prose, render } from "./dom.js";

const STATES = {
  ready: ["ok", "ready"],
  loading: ["warn", "loading"],
  queued: ["warn", "queued"],
  draining: ["warn", "draining"],
  sleeping: ["dim", "asleep"],
  running: ["ok", "running"],
  ended: ["dim", "ended"],
  failed: ["bad", "failed"],
  refused: ["bad", "no room"],
  absent: ["dim", "absent"],
};

export function pill(state, percent = null) {
  const [tone, text] = STATES[state] ?? ["dim", state];
  return h("span", { class: `pill ${tone}` }, h("i", { class: "dot", "aria-hidden": "true" }), percent === null ? text : `${text} ${percent} %`);
}

const ENFORCED = { hardware: "enforced by hardware", driver: "enforced by the driver", runtime: "enforced at run time", advisory: "watched, not enforced", none: "not enforced" };

export function level(name, mechanism) {
  if (!name) return null;
  const title = mechanism ? `By ${mechanism}` : name === "none" ? "The memory is accounted for; nothing stops the model from using more" : null;
  return h("span", { class: `level ${name}`, title }, ENFORCED[name] ?? name);
}

/** Words that only screen readers need: what the eye takes from a column, a colour or a gap. */
export function unseen(text) {
  return h("span", { class: "sr" }, text);
}

/** What is written briefly for the eye, and in words for screen readers. */
export function brief(shown, words) {
  return [h("span", { "aria-hidden": "true" }, shown), unseen(words)];
}

export function card(title, aside, ...children) {
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, title), h("span", { class: "grow" }), aside), ...children);
}

export function button(text, onclick, props = {}) {
  return h("button", { type: "button", onclick, ...props }, text);
}

export function empty(title, text, ...actions) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, prose(text)), h("div", { class: "row" }, ...actions));
}

/** To screen readers. While a dialog is open, all outside of it is hidden from them, so each dialog has an announcer too. */
export function announce(text) {
  const box = [...document.querySelectorAll("dialog[open] .announcer")].at(-1) ?? document.getElementById("announcer");
  box.textContent = text.replaceAll("`", "");
}

/** A result that is worked out again and again while a form is filled in: `job` keeps what was announced last. */
export function announceOnce(job, text) {
  if (job.announced === text) return;
  job.announced = text;
  announce(text);
}

/** Announced, and shown for a few seconds. */
export function say(text, tone = "ok") {
  announce(text);
  const id = Date.now() + Math.random();
  toasts = [...toasts, { id, text, tone }].slice(-4);
  drawLayers();
  setTimeout(() => {
    toasts = toasts.filter((one) => one.id !== id);
    drawLayers();
  }, tone === "bad" ? 9000 : 4000);
}

/** An error where it happened, with what to do about it. */
export function problem(error) {
  return h("p", { class: "notice bad", role: "alert" }, h("strong", {}, prose(error.message)), error.hint && h("small", {}, prose(error.hint)));
}

export function complain(error) {
  const message = /[.!?]$/.test(error.message) ? error.message : `${error.message}.`;
  say(error.hint ? `${message} ${error.hint}` : message, "bad");
}

let toasts = [];
let dialogs = [];
let menu = null;

/** `view` is called at every drawing; `close` ends it. Focus goes in and comes back. */
export function openDialog(view, { label, wide = false, side = false, onClose } = {}) {
  const dialog = { id: Date.now() + Math.random(), view, label, wide, side, onClose };
  dialogs = [...dialogs, dialog];
  drawLayers();
  return {
    close: () => closeDialog(dialog),
    isOpen: () => dialogs.includes(dialog),
  };
}

function closeDialog(dialog) {
  if (!dialogs.includes(dialog)) return;
  dialogs = dialogs.filter((one) => one !== dialog);
  drawLayers();
  dialog.onClose?.();
}

/** `items` is called at every drawing: what can be done may change while the menu is open. */
export function openMenu(anchor, label, items) {
  const box = anchor.getBoundingClientRect();
  menu = { label, items, top: box.bottom + 4, right: Math.max(8, innerWidth - box.right), anchor };
  drawLayers();
}

export function closeMenu(refocus = false) {
  const anchor = menu?.anchor;
  menu = null;
  drawLayers();
  if (refocus) anchor?.focus();
}

export function drawLayers() {
  render(document.getElementById("layers"), [
    ...dialogs.map((dialog) =>
      h(
        "dialog",
        {
          key: dialog.id,
          class: `${dialog.wide ? "wide" : ""} ${dialog.side ? "side" : ""}`,
          "aria-label": dialog.label,
          mounted: (node) => node.showModal(),
          oncancel: (event) => {
            event.preventDefault();
            closeDialog(dialog);
          },
          onclick: (event) => event.target.tagName === "DIALOG" && closeDialog(dialog),
        },
        h("section", { class: "sheet" }, dialog.view(() => closeDialog(dialog))),
        h("p", { class: "sr announcer", "aria-live": "polite", own: true }),
      ),
    ),
    menu && drawMenu(),
    toasts.length ? h("div", { key: "toasts", class: "toasts", popover: "manual", "aria-label": "Notes", mounted: (node) => node.showPopover() }, toasts.map((one) => h("p", { key: one.id, class: one.tone }, prose(one.text)))) : null,
  ]);
}

function drawMenu() {
  const style = { top: `${menu.top}px`, right: `${menu.right}px` };
  return h(
    "div",
    {
      key: "menu",
      class: "menu",
      role: "menu",
      "aria-label": menu.label,
      style,
      mounted: placeMenu,
      onkeydown: moveInMenu,
    },
    menu.items().filter(Boolean).map((item) =>
      item === "-"
        ? h("hr", {})
        : h(
            "button",
            {
              type: "button",
              role: "menuitem",
              class: item.tone ?? "",
              disabled: Boolean(item.disabled),
              title: item.disabled || null,
              onclick: () => {
                closeMenu(true);
                item.run();
              },
            },
            item.text,
            item.note && h("small", {}, item.note),
          ),
    ),
  );
}

/** Never beyond the edge of the window. */
function placeMenu(node) {
  const top = Math.max(8, Math.min(menu.top, innerHeight - node.offsetHeight - 8));
  menu.top = top;
  node.style.setProperty("top", `${top}px`);
  menu.right = Math.max(8, Math.min(menu.right, innerWidth - node.offsetWidth - 8));
  node.style.setProperty("right", `${menu.right}px`);
  node.querySelector("button:not([disabled])")?.focus({ preventScroll: true });
}

function moveInMenu(event) {
  if (event.key === "Escape" || event.key === "Tab") {
    event.preventDefault();
    closeMenu(true);
  } else moveByArrows(event);
}

/** Arrow keys, Home and End move the focus among the buttons of a menu, a row of tabs or a group of choices. */
export function moveByArrows(event) {
  const items = [...event.currentTarget.querySelectorAll("button:not([disabled])")];
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  items[(to + items.length) % items.length]?.focus();
}

addEventListener("pointerdown", (event) => {
  if (menu && !event.target.closest(".menu")) closeMenu();
});

export function confirmFirst({ title, text, act, run }) {
  openDialog(
    (close) => [
      h("header", {}, h("h2", {}, title)),
      h("p", {}, text),
      h(
        "footer",
        {},
        button("Cancel", close, { class: "quiet" }),
        button(act, () => {
          close();
          run();
        }, { class: "primary" }),
      ),
    ],
    { label: title },
  );
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`Copied ${what}.`);
  } catch {
    openDialog((close) => [h("header", {}, h("h2", {}, `Copy ${what}`), h("span", { class: "grow" }), button("Close", close, { class: "quiet" })), h("pre", { tabindex: "0" }, text)], { label: `Copy ${what}`, wide: true });
  }
}

export function field(label, control, note = null, props = {}) {
  return h("label", { class: "field", ...props }, h("span", {}, label), control, note && h("small", {}, prose(note)));
}
