"""Take the pictures of the page that the docs show: `make screenshots`. Needs Debian's chromium.

`make screenshots ARGS="--every FOLDER"` takes every view whole, wide and narrow, light and dark, to look at before a release.

The GPUs are simulated and the engines stream words; everything else is the real daemon, with real sizing and real queues.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page
from tests.web.browser import CHROMIUM, open_browser
from tests.web.scene import PageDaemon, Traffic, ask, put_foreign_process, show

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images"
LARGEST_BYTES = 200_000
WARM_UP_SECONDS = 30.0

ENGINES = {
    "chat": ("--first-token-seconds", "0.12", "--token-seconds", "0.015", "--tokens", "60"),
    "code": ("--first-token-seconds", "0.3", "--token-seconds", "0.025", "--tokens", "60"),
    "failing": ("--die-at-start", "3", "--say", "error: out of memory while loading shard 3 of 4"),
}
MODELS: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "engine": "vllm",
        "context": 8192,
        "concurrency": 8,
        "priority": "high",
        "slo": {"ttft_p95": "500ms", "tpot_p95": "50ms", "availability": "99.5%"},
    },
    "code": {
        "model": "Qwen/Qwen2.5-Coder-7B-Instruct",
        "engine": "vllm",
        "context": 16384,
        "concurrency": 2,
        "priority": "low",
        "keep": "10m",
        "slo": {"ttft_p95": "1500ms"},
    },
    "assistant": {"model": "meta-llama/Llama-3.1-8B-Instruct", "engine": "vllm", "context": 8192, "concurrency": 4},
    "batch": {"model": "Qwen/Qwen2.5-32B-Instruct", "engine": "vllm", "context": 4096, "concurrency": 4, "priority": "low"},
    "embed": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "context": 4096, "keep": "30m"},
    "failing": {"model": "Qwen/Qwen2.5-0.5B-Instruct", "engine": "vllm", "context": 2048},
}
TRAFFIC = [("chat", 4, 0.35), ("code", 4, 0.1), ("assistant", 1, 1.5), ("batch", 1, 3.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    name: str
    path: str = "/"
    act: Callable[[Page], None] = lambda _: None
    width: int = 1280
    height: int = 900
    scheme: Literal["light", "dark"] = "light"
    full: bool = False


def _deploy(page: Page) -> None:
    page.get_by_role("button", name="Deploy a model").click()
    page.get_by_label("Model", exact=True).fill("meta-llama/Llama-3.1-70B-Instruct")
    page.get_by_label("Name that callers use").fill("large")
    page.get_by_label("Context, tokens").fill("32768")
    page.get_by_label("Requests at once").fill("16")
    page.wait_for_selector(".verdict .waterfall")
    page.wait_for_timeout(800)


def _drawer(page: Page) -> None:
    page.locator("button.name", has_text="chat").click()
    page.get_by_role("tab", name="Sizing").click()
    page.wait_for_selector(".waterfall")


def _layout(page: Page) -> None:
    page.get_by_role("button", name="Change the layout of GPU 0").click()
    page.locator("button.layout", has_text="CPX/NPS1").click()
    page.wait_for_selector(".preview .notice")


def _what_if(page: Page) -> None:
    page.get_by_label("Model", exact=True).fill("Qwen/Qwen2.5-32B-Instruct")
    page.get_by_role("button", name="Add").click()
    page.locator(".suppose select").nth(1).select_option("DPX/NPS1")
    page.wait_for_selector(".gpu.pair .share.fresh")


def _chat(page: Page) -> None:
    page.get_by_role("button", name="+ Compare").click()
    page.get_by_label("Message").fill("Which of you answers first?")
    page.keyboard.press("Enter")
    page.locator(".message.assistant small").nth(1).wait_for()


def _scroll_to_models(page: Page) -> None:
    page.evaluate("document.querySelector('table.models').scrollIntoView()")


def _menu(page: Page) -> None:
    page.get_by_role("button", name="More actions for chat").click()


def _resize(page: Page) -> None:
    _menu(page)
    page.get_by_role("menuitem", name="Resize").click()
    page.wait_for_selector("dialog .notice")


def _tab(name: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.locator("button.name", has_text="chat").click()
        page.get_by_role("tab", name=name).click()
        page.wait_for_timeout(600)

    return act


def _failed(page: Page) -> None:
    page.locator("button.name", has_text="failing").click()
    page.wait_for_timeout(600)


def _keys(page: Page) -> None:
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Keys").click()


def _path(page: Page) -> None:
    page.locator("tr", has_text="code").get_by_role("button", name="Path").first.click()
    page.wait_for_selector("dialog .path")


SHOTS = (
    Shot(name="models", height=1060),
    Shot(name="models-dark", height=900, scheme="dark"),
    Shot(name="models-narrow", width=390, height=844),
    Shot(
        name="models-narrow-table",
        width=390,
        height=844,
        act=lambda page: page.locator("table.models").scroll_into_view_if_needed(),
    ),
    Shot(name="deploy", act=_deploy, height=860),
    Shot(name="sizing", act=_drawer, height=820),
    Shot(name="layout", act=_layout, height=760),
    Shot(name="what-if", path="/#/what-if", act=_what_if, height=1000),
    Shot(name="chat", path="/#/chat/chat", act=_chat, scheme="dark", height=720),
    Shot(name="activity", path="/#/activity", height=1000),
    Shot(name="request-path", path="/#/activity", act=_path, height=720),
    Shot(name="promises", path="/#/promises", height=900),
)


VIEWS = (
    Shot(name="models", full=True),
    *(Shot(name=f"drawer-{name.lower().replace(' ', '-')}", act=_tab(name)) for name in ("Overview", "Sizing", "Placement")),
    *(
        Shot(name=f"drawer-{name.lower().replace(' ', '-')}", act=_tab(name))
        for name in ("Promises", "History", "Logs", "Stack entry")
    ),
    Shot(name="drawer-failed", act=_failed),
    Shot(name="menu", act=_menu),
    Shot(name="resize", act=_resize),
    Shot(name="keys", act=_keys),
    Shot(name="deploy", act=_deploy),
    Shot(name="layout", act=_layout),
    Shot(name="what-if", path="/#/what-if", act=_what_if, full=True),
    Shot(name="chat", path="/#/chat/chat", act=_chat),
    Shot(name="activity", path="/#/activity", full=True),
    Shot(name="request-path", path="/#/activity", act=_path),
    Shot(name="promises", path="/#/promises", full=True),
)


def every_view() -> Iterator[Shot]:
    """Wide and narrow, light and dark."""
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for view in VIEWS:
        for width, height in ((1280, 900), (390, 844)):
            for scheme in schemes:
                yield replace(view, name=f"{view.name}-{width}-{scheme}", width=width, height=height, scheme=scheme)


def main() -> int:
    if CHROMIUM is None:
        print("there is no chromium: apt-get install chromium fonts-dejavu-core")
        return 1
    parser = argparse.ArgumentParser(description="Take the pictures of the page.")
    parser.add_argument("names", nargs="*", help="of pictures; all without")
    parser.add_argument("--every", type=Path, metavar="FOLDER", help="every view, wide and narrow, light and dark")
    given = parser.parse_args()
    wanted, target = set(given.names), given.every or TARGET
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        daemon = PageDaemon(Path(folder) / "home", engines=ENGINES, restart_limit=1.0, restart_delay_seconds=600.0)
        client = daemon.start()
        try:
            for name, model in MODELS.items():
                show(client, {name: model})
            put_foreign_process(daemon.home.path, "sim-mi300x-1", pid=4411)
            ask(daemon.url, "embed")
            with Traffic(daemon.url, TRAFFIC), open_browser() as browser:
                time.sleep(WARM_UP_SECONDS)
                for shot in every_view() if given.every else SHOTS:
                    if not wanted or shot.name in wanted:
                        _take(browser, daemon.url, shot, target)
        finally:
            daemon.stop()
    return 0


def _take(browser: Browser, url: str, shot: Shot, target: Path) -> None:
    context = browser.new_context(viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme)
    page = context.new_page()
    page.goto(url + shot.path)
    page.wait_for_selector(".connection.live")
    page.wait_for_timeout(2500)
    shot.act(page)
    page.wait_for_timeout(400)
    path = target / f"{shot.name}.png"
    page.screenshot(path=path, full_page=shot.full)
    context.close()
    size = path.stat().st_size
    print(f"{path.name:28} {size:>8} bytes")
    if size > LARGEST_BYTES and target == TARGET:
        print(f"  larger than {LARGEST_BYTES} bytes")


if __name__ == "__main__":
    sys.exit(main())
