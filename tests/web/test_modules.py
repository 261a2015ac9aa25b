"""The page's own modules by themselves: how the document follows a description, and how numbers read."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.web.browser import needs_chromium

from aimgpu.web import assets

pytestmark = needs_chromium

UNKNOWN = "\N{EN DASH}"
FOLDER = Path(assets.__file__).parent / "page"


@pytest.fixture(scope="module")
def blank(browser: Browser) -> Page:
    return browser.new_page()


def call(page: Page, module: str, body: str, given: Any = None) -> Any:
    """Run `body` with everything that a module without imports defines."""
    text = (FOLDER / module).read_text(encoding="utf-8").replace("export ", "")
    return page.evaluate(f"(given) => {{ {text}; {body} }}", given)


MARKDOWN = """
const outline = (node) => typeof node !== "object" ? String(node) : node.tag === "a"
  ? `<a ${node.props.href}>${node.children.map(outline).join("")}</a>`
  : node.tag === "div" && node.props.class === "codeTop" ? `[${node.children[0].children.join("")}]`
  : `<${node.tag}>${node.children.map(outline).join("")}</${node.tag}>`;
return markdown(given).map(outline).join("");
"""


def read_markdown(page: Page, text: str) -> str:
    joined = (FOLDER / "dom.js").read_text(encoding="utf-8") + (FOLDER / "markdown.js").read_text(encoding="utf-8")
    script = joined.replace('import { h } from "./dom.js";', "").replace("export ", "")
    found = page.evaluate(f"(given) => {{ {script}; {MARKDOWN} }}", text)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("## A *b*\ntext", "<p>A <em>b</em></p><p>text</p>"),
        ("**bold** and `a*b` and ~~gone~~", "<p><strong>bold</strong> and <code>a*b</code> and <s>gone</s></p>"),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("1. a\n\n2. b", "<ol><li>a</li><li>b</li></ol>"),
        ("```py\nx = *1*\n```\nend", "<div>[py]<pre><code>x = *1*</code></pre></div><p>end</p>"),
        ("```\nstill streams", "<div>[]<pre><code>still streams</code></pre></div>"),
        ("> quoted\n> too", "<blockquote><p>quoted\ntoo</p></blockquote>"),
        ("[a](https://b.example/c)", "<p><a https://b.example/c>a</a></p>"),
        ("see https://b.example/c.", "<p>see <a https://b.example/c>https://b.example/c</a>.</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("2 * 3 * 4, snake_case_name, 5 ** 2", "<p>2 * 3 * 4, snake_case_name, 5 ** 2</p>"),
        ("<img src=x onerror=alert(1)>", "<p><img src=x onerror=alert(1)></p>"),
    ],
)
def test_markdown_is_read_as_elements_and_markup_stays_text(blank: Page, text: str, expected: str) -> None:
    assert read_markdown(blank, text) == expected


def test_a_table_of_markdown_has_its_cells(blank: Page) -> None:
    found = read_markdown(blank, "| a | b |\n| --- | --- |\n| 1 | **2** |")
    assert "<span>a</span><span>b</span>" in found
    assert "<span>1</span><span><strong>2</strong></span>" in found


@pytest.mark.parametrize("hostile", ["**a " * 20_000, "> " * 5_000, "[" * 30_000, "`" * 20_001, "- " * 4_000, "*a* " * 20_000])
def test_an_answer_of_marks_alone_does_not_hold_up_the_page(blank: Page, hostile: str) -> None:
    blank.set_default_timeout(20_000)
    assert read_markdown(blank, hostile)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", "qwen2.5-7b"),
        ("google/gemma-3-270m-it", "gemma-3-270m"),
        ("/models/Mine (1).gguf", "mine--1"),
        ("...", "model"),
    ],
)
def test_a_model_is_offered_under_a_short_name(blank: Page, model: str, name: str) -> None:
    text = (FOLDER / "deploy.js").read_text(encoding="utf-8")
    start = text.index("export function shortName")
    function = text[start : text.index("\n}\n", start) + 3].replace("export ", "")
    assert blank.evaluate(f"(given) => {{ {function} return shortName(given); }}", model) == name


RANDOM_TREES = """
let seed = given;
const random = (below) => { seed = (seed * 1103515245 + 12345) % 2147483648; return seed % below; };
const tags = ["p", "b", "li"];
const describe = () => {
  const keys = [...Array(8).keys()].sort(() => random(3) - 1).slice(0, random(8));
  const below = () => [`text ${random(9)}`, random(2) ? h("i", {}, "x") : null];
  const keyed = keys.map((key) => h(tags[random(2)], { key, class: `c${random(3)}` }, below()));
  const at = random(keyed.length + 1);
  return random(2) ? [...keyed.slice(0, at), h("hr", {}), ...keyed.slice(at)] : keyed;
};
const below = (node) => [...node.childNodes].map(shown);
const shown = (node) => node.nodeType === 3 ? node.nodeValue : [node.__tag, node.getAttribute("class"), below(node)];
const wanted = (one) => typeof one === "object" ? [one.tag, one.props.class ?? null, one.children.map(wanted)] : String(one);
const parent = document.createElement("div");
const wrong = [];
let before = [];
for (let round = 0; round < 400; round += 1) {
  const keyed = [...parent.childNodes].filter((node) => node.__key !== undefined);
  const kept = new Map(keyed.map((node) => [`${node.__key}${node.__tag}`, node]));
  const next = describe();
  render(parent, next);
  if (JSON.stringify(below(parent)) !== JSON.stringify(next.map(wanted))) wrong.push(`round ${round} shows something else`);
  for (const node of parent.childNodes) {
    const old = kept.get(`${node.__key}${node.__tag}`);
    if (node.__key !== undefined && old && old !== node) wrong.push(`round ${round} made ${node.__key} again`);
  }
}
return wrong;
"""


@pytest.mark.parametrize("seed", [1, 20, 300])
def test_the_document_becomes_the_description_and_keeps_the_nodes_that_it_can(blank: Page, seed: int) -> None:
    assert call(blank, "dom.js", RANDOM_TREES, seed) == []


def test_text_that_looks_like_markup_stays_text(blank: Page) -> None:
    body = """
    const parent = document.createElement("div");
    render(parent, [h("p", { title: given }, given), prose(given)]);
    const first = parent.firstChild;
    return [parent.querySelectorAll("img, script").length, first.textContent, first.getAttribute("title")];
    """
    markup = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    assert call(blank, "dom.js", body, markup) == [0, markup, markup]


def test_what_is_being_typed_is_not_overwritten(blank: Page) -> None:
    body = """
    const parent = document.body.appendChild(document.createElement("div"));
    const view = (value) => h("input", { value });
    render(parent, view("old"));
    const box = parent.firstChild;
    box.focus();
    box.value = "typed";
    render(parent, view("old"));
    const typed = box.value;
    box.blur();
    render(parent, view("new"));
    parent.remove();
    return [typed, box.value];
    """
    assert call(blank, "dom.js", body) == ["typed", "new"]


def test_handlers_and_attributes_that_are_gone_are_gone(blank: Page) -> None:
    body = """
    const parent = document.createElement("div");
    let count = 0;
    const click = () => { count += 1; };
    render(parent, h("button", { onclick: click, class: "a", disabled: true, style: { color: "red", top: "1px" } }));
    const button = parent.firstChild;
    const before = [button.disabled, button.style.color];
    render(parent, h("button", { onclick: click, style: { top: "1px" } }));
    button.click();
    render(parent, h("button", {}));
    button.click();
    return [before, count, button.className, button.disabled, button.style.color, button === parent.firstChild];
    """
    assert call(blank, "dom.js", body) == [[True, "red"], 1, "", False, "", True]


@pytest.mark.parametrize(
    ("call_", "expected"),
    [
        ("duration(null)", UNKNOWN),
        ("duration(0)", "0 ms"),
        ("duration(0.0004)", "<1 ms"),
        ("duration(0.0042)", "4.2 ms"),
        ("duration(0.25)", "250 ms"),
        ("duration(9.96)", "10 s"),
        ("duration(59.4)", "59 s"),
        ("duration(61)", "1 min 1 s"),
        ("duration(3599)", "59 min"),
        ("duration(7200)", "2 h"),
        ("duration(129600)", "1.5 d"),
        ("percent(null)", UNKNOWN),
        ("percent(0.99951, 2)", "99.95 %"),
        ("plural(1, 'GPU')", "1 GPU"),
        ("plural(1200, 'GPU')", "1,200 GPUs"),
        ("rate(9.94)", "9.9"),
        ("rate(12.6)", "13"),
        ("rate(undefined)", UNKNOWN),
        ("ago(null)", "never"),
        ("gib(undefined)", UNKNOWN),
        ("gib(12 * 2 ** 30 + 1)", "12"),
        ("promiseText('95% ttft <= 500ms')", "First token within 500 ms, for 95 % of requests"),
        ("promiseText('95% throughput >= 20 tok/s')", "Tokens of an answer at least 20 tok/s, for 95 % of requests"),
        ("promiseText('99.5% availability')", "Answered without failure, for 99.5 % of requests"),
        ("promiseText('something else')", "something else"),
        ("sentence('fits there')", "Fits there."),
        ("gib(12 * 2 ** 30 + 1, { up: true })", "12.1"),
        ("shortModel('org/name/last')", "last"),
    ],
)
def test_numbers_read_as_people_read_them_and_unknown_is_no_zero(blank: Page, call_: str, expected: str) -> None:
    assert call(blank, "format.js", f"return {call_};") == expected


def test_a_model_keeps_its_colour_whatever_is_deployed_later(blank: Page) -> None:
    body = """
    assignHues(["a", "b"]);
    const before = hue("a");
    assignHues(["c", ...Array.from({ length: 20 }, (_, at) => `m${at}`), "a"]);
    return [before === hue("a"), hue("a") === hue("b"), new Set(Array.from({ length: 20 }, (_, at) => hue(`m${at}`))).size];
    """
    assert call(blank, "format.js", body) == [True, False, 8]
