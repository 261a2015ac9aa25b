"""The page for people who use a keyboard or a screen reader: axe-core on every view, in both themes, and a walk by keyboard."""

import os
from collections.abc import Iterator
from importlib import resources
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.web.accessibility_tree import find_problems, read_tree
from tests.web.browser import needs_chromium, open_page
from tests.web.scene import SMALL, PageDaemon, ask, put_foreign_process, show

from aimgpu.cli.client import DaemonClient

pytestmark = needs_chromium

AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
VIEWS = ("models", "chat", "activity", "promises", "what-if")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageDaemon]:
    """With a model that answers, one with a promise, one that has no room, and a process that is not ours."""
    daemon = PageDaemon(tmp_path_factory.mktemp("page") / "home", grace_seconds=0.5)
    client = daemon.start()
    put_foreign_process(daemon.home.path, "sim-mi300x-1", pid=os.getpid())
    show(client, {"chat": {**SMALL, "slo": {"ttft_p95": "2s"}}, "helper": {**SMALL, "keep": "1h", "priority": "low"}})
    assert ask(daemon.url, "chat") == 200
    yield daemon
    daemon.stop()


def problems(page: Page) -> list[str]:
    """What axe-core finds in what is shown now, in words; nothing animates meanwhile."""
    if not page.evaluate("typeof window.axe === 'object'"):
        page.evaluate(AXE)
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['impact']} {one['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def show_view(page: Page, daemon: PageDaemon, view: str) -> None:
    """And wait for it: the view before it may have fields of the same names."""
    page.goto(f"{daemon.url}/#/{view}")
    page.wait_for_selector(f"main.view-{view}")
    if view == "models":
        expect(page.locator("button.name", has_text="chat")).to_be_visible()


@pytest.mark.parametrize(
    ("theme", "width"),
    [("light", 390), ("dark", 1280), *(pytest.param(*one, marks=pytest.mark.rest) for one in (("light", 1280), ("dark", 390)))],
)
def test_axe_finds_nothing_in_any_view_or_dialog(
    browser: Browser, daemon: PageDaemon, theme: Literal["light", "dark"], width: int
) -> None:
    page = open_page(browser, daemon.link(), width=width).page
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    found: dict[str, list[str]] = {}
    for view in VIEWS:
        show_view(page, daemon, view)
        found[view] = problems(page)
    for name in DIALOGS if width == 1280 else ("search", "deploy", "menu"):
        show_view(page, daemon, "models")
        DIALOGS[name](page)
        found[name] = problems(page)
        page.reload()
        page.wait_for_selector(".connection.live")
    page.context.close()
    assert {name: each for name, each in found.items() if each} == {}


def _open_deploy(page: Page) -> None:
    page.keyboard.press("d")
    page.get_by_label("Model", exact=True).fill("meta-llama/Llama-3.1-405B-Instruct")
    expect(page.locator(".verdict .notice.bad")).to_be_visible()


def _open_layout(page: Page) -> None:
    page.get_by_role("button", name="Change the layout of gpu0").click()
    page.locator("button.layout", has_text="CPX/NPS1").click()
    expect(page.locator(".preview .notice")).to_be_visible()


def _open_menu(page: Page) -> None:
    page.get_by_role("button", name="More actions for chat").click()
    expect(page.get_by_role("menu")).to_be_visible()


def _open_drawer(tab: str) -> Any:
    def open_tab(page: Page) -> None:
        page.locator("button.name", has_text="chat").click()
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_role("tabpanel")).to_be_visible()

    return open_tab


def _search(page: Page) -> None:
    page.keyboard.press("d")
    expect(page.get_by_role("group", name="Models found").get_by_role("button").first).to_be_visible()


def _copy(page: Page) -> None:
    page.get_by_role("button", name="Copy for curl").click()
    expect(page.locator(".toasts p")).to_be_visible()


DIALOGS = {
    "search": _search,
    "copied": _copy,
    "deploy": _open_deploy,
    "layout": _open_layout,
    "menu": _open_menu,
    "overview": _open_drawer("Overview"),
    "sizing": _open_drawer("Sizing"),
    "placement": _open_drawer("Placement"),
    "logs": _open_drawer("Logs"),
}


def press_until(page: Page, name: str, *, key: str = "Tab", most: int = 80) -> None:
    """Move the focus with one key until it is on the control with this name."""
    seen = []
    for _ in range(most):
        page.keyboard.press(key)
        seen.append(page.evaluate(FOCUSED))
        if seen[-1] == name:
            return
    raise AssertionError(f"{name!r} was not reached with {key}; passed {list(dict.fromkeys(seen))}")


FOCUSED = """() => {
  const one = document.activeElement;
  return one.getAttribute('aria-label') ?? one.labels?.[0]?.querySelector('span')?.textContent ?? one.textContent.trim();
}"""


def test_a_model_is_deployed_asked_and_stopped_by_keyboard_alone(browser: Browser, daemon: PageDaemon) -> None:
    page = open_page(browser, daemon.link()).page
    press_until(page, "Deploy a model")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Deploy a model")).to_be_visible()
    expect(page.get_by_label("Model", exact=True)).to_be_focused()
    page.keyboard.type("HuggingFaceTB/SmolLM2-135M-Instruct")
    expect(page.get_by_label("Name that callers use")).to_be_visible()
    press_until(page, "Name that callers use")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("typed")
    expect(page.locator(".verdict .notice.ok")).to_be_visible()
    press_until(page, "Deploy")
    page.keyboard.press("Enter")
    expect(page.locator("table.models tr:has(button.name:text-is('typed'))")).to_contain_text("ready")

    page.keyboard.press("/")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    press_until(page, "Model", key="Shift+Tab")
    page.keyboard.type("typed")
    press_until(page, "Message")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant small")).to_contain_text("tokens/s")

    press_until(page, "Models", key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main.view-models")).to_be_visible()
    press_until(page, "More actions for typed")
    page.keyboard.press("Enter")
    press_until(page, "Stop", key="ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Stop typed?")).to_be_visible()
    press_until(page, "Stop")
    page.keyboard.press("Enter")
    expect(page.locator("button.name", has_text="typed")).to_have_count(0)
    page.context.close()


def test_the_accessibility_tree_names_what_is_there(browser: Browser, daemon: PageDaemon) -> None:
    """The nearest to a screen reader that runs here: what Chromium hands to one."""
    page = open_page(browser, daemon.link()).page
    show_view(page, daemon, "models")
    tree = page.locator("body").aria_snapshot()
    for line in (
        'heading "Models" [level=1]',
        'navigation "Views"',
        'link "Models"',
        'group "Memory of gpu0"',
        'columnheader "First token, p95"',
        'button "More actions for chat"',
        "status",
    ):
        assert line in tree, f"{line} is not in\n{tree}"
    assert any("button" in line and "chat:" in line and "granted" in line for line in tree.splitlines())
    announced = page.locator("#announcer")
    assert announced.get_attribute("aria-live") == "polite"
    page.get_by_role("button", name="More actions for helper").click()
    page.get_by_role("menuitem", name="Priority medium").click()
    expect(announced).to_have_text("helper has priority medium.")
    page.context.close()


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.rest)])
def test_a_screen_reader_finds_a_name_a_role_and_a_header_for_everything(
    browser: Browser, daemon: PageDaemon, width: int
) -> None:
    page = open_page(browser, daemon.link(), width=width).page
    found: dict[str, list[str]] = {}
    for view in VIEWS:
        show_view(page, daemon, view)
        tree = read_tree(page)
        found[view] = find_problems(tree)
        assert {"banner", "navigation", "main", "contentinfo"} <= {one.role for one in tree.walk()}, view
        assert tree.find("heading")[0].properties["level"] == 1
    for name, open_it in DIALOGS.items():
        show_view(page, daemon, "models")
        open_it(page)
        found[name] = find_problems(read_tree(page))
        page.reload()
        page.wait_for_selector(".connection.live")
    page.context.close()
    assert {name: each for name, each in found.items() if each} == {}


def test_the_tables_are_tables_on_a_narrow_screen_too(browser: Browser, daemon: PageDaemon) -> None:
    """They look like cards there; CSS that changes how they are laid out may take their roles away."""
    page = open_page(browser, daemon.link(), width=390).page
    expect(page.locator("table.models tbody tr")).to_have_count(2)
    (table,) = [
        one for one in read_tree(page).find("table") if any("First token" in head.name for head in one.find("columnheader"))
    ]
    assert len(table.find("row")) == 3, "the headers, chat and helper"
    page.context.close()


def test_what_happens_to_models_is_announced_also_while_a_dialog_is_open(browser: Browser, daemon: PageDaemon) -> None:
    client = DaemonClient(daemon.url, daemon.home.read_token())
    page = open_page(browser, daemon.link()).page
    expect(page.locator("#announcer")).to_be_empty()
    show(client, {"late": SMALL})
    expect(page.locator("#announcer")).to_contain_text("late: ready on")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard")
    expect(dialog).to_be_visible()
    client.release(["late"])
    expect(dialog.locator(".announcer")).to_contain_text("late: stopped")
    spoken = [one for one in read_tree(page).walk() if one.properties.get("live") == "polite"]
    assert any("late: stopped" in below.name for one in spoken for below in one.walk()), "what is behind a dialog is hidden"
    page.context.close()


def test_the_focus_comes_back_to_where_a_dialog_was_opened(browser: Browser, daemon: PageDaemon) -> None:
    page = open_page(browser, daemon.link()).page
    name = page.locator("button.name", has_text="chat")
    for opener, closing in (
        (name, "Escape"),
        (page.get_by_role("button", name="Deploy a model"), "Escape"),
        (page.get_by_role("button", name="Export stack"), "Escape"),
        (page.get_by_role("button", name="Change the layout of gpu0"), "Escape"),
    ):
        opener.focus()
        page.keyboard.press("Enter")
        expect(page.locator("dialog[open]")).to_have_count(1)
        page.keyboard.press(closing)
        expect(page.locator("dialog[open]")).to_have_count(0)
        expect(opener).to_be_focused()
    more = page.get_by_role("button", name="More actions for helper")
    more.focus()
    page.keyboard.press("Enter")
    press_until(page, "Stop", key="ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Stop helper?")).to_be_visible()
    page.keyboard.press("Escape")
    expect(more).to_be_focused()
    page.context.close()


def test_arrow_keys_move_among_tabs_and_layouts_and_no_order_is_forced(browser: Browser, daemon: PageDaemon) -> None:
    page = open_page(browser, daemon.link()).page
    assert page.evaluate("[...document.querySelectorAll('[tabindex]')].filter((one) => one.tabIndex > 0).length") == 0
    page.locator("button.name", has_text="chat").click()
    page.get_by_role("tab", name="Overview").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Sizing")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("tabpanel", name="Sizing")).to_be_visible()
    page.keyboard.press("End")
    expect(page.get_by_role("tab", name="Stack entry")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Overview")).to_be_focused()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Change the layout of gpu1").click()
    page.get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio").nth(1)).to_be_focused()
    page.context.close()


def test_skipping_to_the_content_stays_in_the_view(browser: Browser, daemon: PageDaemon) -> None:
    page = open_page(browser, daemon.link(), "/#/activity").page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main.view-activity")).to_be_focused()
    page.context.close()


def test_a_share_of_a_bar_opens_its_model_with_either_key(browser: Browser, daemon: PageDaemon) -> None:
    page = open_page(browser, daemon.link()).page
    share = page.get_by_role("group", name="Memory of GPU").get_by_role("button", name="chat:").first
    for key in ("Enter", "Space"):
        share.focus()
        page.keyboard.press(key)
        expect(page.get_by_role("dialog", name="Model chat")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("dialog[open]")).to_have_count(0)
    page.context.close()
