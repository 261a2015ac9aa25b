// A small virtual tree: `h` describes an element, `render` makes the document equal to the description.
// Text is only ever set as text, and no attribute takes markup, so nothing that a model or a user wrote can become code.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect", "line", "g", "text", "circle", "polyline", "title", "defs", "pattern"]);

export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: flatten(children) };
}

function flatten(children) {
  const found = [];
  for (const child of children) {
    if (Array.isArray(child)) found.push(...flatten(child));
    else if (child !== null && child !== undefined && child !== false && child !== true) found.push(child);
  }
  return found;
}

/** Text in which `commands` are set apart. */
export function prose(text) {
  return String(text).split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}

export function render(parent, children) {
  patchChildren(parent, flatten([children]), false);
}

function patchChildren(parent, wanted, svg) {
  const old = [...parent.childNodes];
  const keyed = new Map();
  for (const node of old) if (node.__key !== undefined) keyed.set(node.__key, node);
  const unkeyed = old.filter((node) => node.__key === undefined);
  const kept = new Set();
  let place = parent.firstChild;
  for (const child of wanted) {
    const node = match(child, keyed, unkeyed) ?? create(child, svg);
    kept.add(node);
    if (node !== place) parent.insertBefore(node, place);
    else place = place.nextSibling;
    update(node, child, svg);
  }
  for (const node of old) if (!kept.has(node)) remove(node);
}

function match(child, keyed, unkeyed) {
  if (typeof child !== "object") {
    const at = unkeyed.findIndex((node) => node.nodeType === Node.TEXT_NODE);
    return at === -1 || at > 0 ? null : unkeyed.splice(at, 1)[0];
  }
  if (child.props.key !== undefined) {
    const node = keyed.get(child.props.key);
    return node && node.__tag === child.tag ? node : null;
  }
  const first = unkeyed[0];
  return first && first.__tag === child.tag ? unkeyed.shift() : null;
}

function create(child, svg) {
  if (typeof child !== "object") return document.createTextNode(String(child));
  const node =
    svg || SVG_TAGS.has(child.tag) ? document.createElementNS(SVG, child.tag) : document.createElement(child.tag);
  node.__tag = child.tag;
  node.__props = {};
  if (child.props.key !== undefined) node.__key = child.props.key;
  return node;
}

function update(node, child, svg) {
  if (typeof child !== "object") {
    if (node.nodeValue !== String(child)) node.nodeValue = String(child);
    return;
  }
  const before = node.__props;
  const created = Object.keys(before).length === 0 && !node.__made;
  node.__made = true;
  for (const name of Object.keys(before)) if (!(name in child.props)) setProp(node, name, before[name], undefined);
  for (const [name, value] of Object.entries(child.props)) {
    if (before[name] !== value || name === "value" || name === "checked") setProp(node, name, before[name], value);
  }
  node.__props = child.props;
  if (!child.props.own) patchChildren(node, child.children, svg || child.tag === "svg");
  if (child.tag === "select" && child.props.value !== undefined) node.value = child.props.value;
  if (created && child.props.mounted) queueMicrotask(() => child.props.mounted(node));
}

function setProp(node, name, old, value) {
  if (name === "key" || name === "mounted" || name === "own") return;
  if (name.startsWith("on")) {
    const event = name.slice(2);
    if (old) node.removeEventListener(event, old);
    if (value) node.addEventListener(event, value);
  } else if (name === "style") {
    for (const key of Object.keys(old ?? {})) if (!value || !(key in value)) node.style.removeProperty(key);
    for (const [key, one] of Object.entries(value ?? {})) node.style.setProperty(key, String(one));
  } else if (name === "value" || name === "checked" || name === "disabled" || name === "open" || name === "indeterminate") {
    if (name === "value" && node.__tag !== "select") {
      if (node.value !== String(value ?? "") && document.activeElement !== node) node.value = value ?? "";
      else if (old === undefined && value !== undefined && node.value === "") node.value = value;
    } else if (node.__tag !== "dialog") node[name] = value ?? false;
  } else if (value === undefined || value === null || value === false) {
    node.removeAttribute(name === "class" ? "class" : name);
  } else {
    node.setAttribute(name, value === true ? "" : String(value));
  }
}

/** A dialog gives the focus back only when it is closed first. */
function remove(node) {
  if (node.__tag === "dialog" && node.open) node.close();
  node.remove();
}
