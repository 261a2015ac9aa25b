// Markdown as models write it, as descriptions of elements: text stays text, so an answer can bring no markup of its own.
// Read: paragraphs, headings, lists, quotes, tables, fenced code, and within a line code, bold, italics, strike-through, links.

import { h } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVIDER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|\*(?=[^\s*])([^*]*?[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"])/;
const LONGEST = 5000; // of a paragraph: the search for marks in a longer one would hold up the page
const DEEPEST = 6; // an answer that nests without end is shown as it is from here on

/** `codeTools`: what stands above a block of code, of its text. */
export function markdown(text, codeTools = () => null) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), codeTools, 0);
}

function blocks(lines, codeTools, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const end = (part) => {
      let to = at;
      while (to < lines.length && part(lines[to], to)) to += 1;
      return to;
    };
    const fence = FENCE.exec(line);
    let to = at + 1;
    if (fence) {
      const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (to < lines.length && !close.test(lines[to])) to += 1; // an answer that still streams has no end yet
      const code = lines.slice(at + 1, to).join("\n");
      found.push(h("div", { class: "code" }, h("div", { class: "codeTop" }, h("small", {}, fence[2]), codeTools(code)), h("pre", { tabindex: "0" }, h("code", {}, code))));
      to += 1;
    } else if (!line.trim()) {
      // between paragraphs
    } else if (HEADING.test(line)) {
      const [, marks, words] = HEADING.exec(line);
      found.push(h("p", { class: `heading n${marks.length}`, role: "heading", "aria-level": 2 }, inline(words, depth)));
    } else if (RULE.test(line)) {
      found.push(h("hr", {}));
    } else if (line.startsWith(">") && depth < DEEPEST) {
      to = end((one) => one.startsWith(">"));
      found.push(h("blockquote", {}, blocks(lines.slice(at, to).map((one) => one.replace(/^> ?/, "")), codeTools, depth + 1)));
    } else if (ROW.test(line) && DIVIDER.test(lines[at + 1] ?? "")) {
      to = end((one) => ROW.test(one));
      found.push(table(lines.slice(at, to), depth));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      const indent = /^\s*/.exec(line)[0].length;
      to = end((one, where) => where === at || (ITEM.test(one) && /^\s*/.exec(one)[0].length >= indent) || /^\s*/.exec(one)[0].length > indent || (!one.trim() && ITEM.test(lines[where + 1] ?? "")));
      found.push(list(lines.slice(at, to), indent, codeTools, depth));
    } else {
      to = end((one, where) => where === at || (one.trim() && !FENCE.test(one) && !HEADING.test(one) && !ITEM.test(one) && !RULE.test(one) && !one.startsWith(">")));
      found.push(h("p", {}, inline(lines.slice(at, to).join("\n"), depth)));
    }
    at = to;
  }
  return found;
}

function list(lines, indent, codeTools, depth) {
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(indent + 2, /^\s*/.exec(line)[0].length)));
  }
  const first = ITEM.exec(lines[0])[2];
  const tight = (parts) => (parts.length && parts[0].tag === "p" ? [...parts[0].children, ...parts.slice(1)] : parts);
  const made = items.map((item, at) => h("li", { key: at }, tight(blocks(item, codeTools, depth + 1))));
  return /\d/.test(first) ? h("ol", { start: Number.parseInt(first, 10) }, made) : h("ul", {}, made);
}

function table(lines, depth) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => inline(cell.trim(), depth));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    h("div", { class: "grid", role: "table" }, [lines[0], ...lines.slice(2)].map((line, row) => h("div", { key: row, role: "row" }, cells(line).map((cell, at) => h("span", { key: at, role: row ? "cell" : "columnheader" }, cell))))),
  );
}

function inline(text, depth) {
  if (text.length > LONGEST) return [text];
  const parts = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found && depth < DEEPEST; found = INLINE.exec(rest)) {
    const [whole, , code, strong, strongToo, slanted, slantedToo, struck, label, link, bare] = found;
    const [bold, italic] = [strong ?? strongToo, slanted ?? slantedToo];
    parts.push(rest.slice(0, found.index));
    if (code !== undefined) parts.push(h("code", {}, code.replace(/\n/g, " ")));
    else if (bold !== undefined) parts.push(h("strong", {}, inline(bold, depth + 1)));
    else if (italic !== undefined) parts.push(h("em", {}, inline(italic, depth + 1)));
    else if (struck !== undefined) parts.push(h("s", {}, inline(struck, depth + 1)));
    else parts.push(h("a", { href: link ?? bare, target: "_blank", rel: "noopener noreferrer", title: link ?? null }, label ?? bare));
    rest = rest.slice(found.index + whole.length);
  }
  return [...parts, rest].filter((part) => part !== "");
}
