"""Take the pictures of the page that the docs show, of `make up` itself: `make screenshots`. Needs Debian's chromium.

`make screenshots ARGS="--every FOLDER"` takes every view, wide and narrow, light and dark, to look at before a release.

Nothing is staged: it runs `make up` with a state folder of its own, asks the three models of examples/stack.yaml for a minute,
and looks at their page. Without a GPU that is the simulated MI300X, as every user without one sees it.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page
from tests.web.browser import CHROMIUM, open_browser
from tests.web.scene import Traffic

from aimgpu.cli.client import DaemonClient
from aimgpu.home import Home

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "images"
LARGEST_BYTES = 200_000
WARM_UP_SECONDS = 60.0
MOST_MS = 120_000
PORT = 8080  # the default, which the pictures show where it is free
TRAFFIC = [("chat", 2, 0.6), ("code", 1, 1.0), ("small", 1, 2.0)]
QUESTION = "What is a GPU? Answer in one sentence."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    name: str
    path: str = "/"
    act: Callable[[Page], None] = lambda _: None
    width: int = 1280
    height: int = 900
    scheme: Literal["light", "dark"] = "light"
    full: bool = False


def _find(page: Page) -> None:
    page.get_by_role("button", name="Deploy a model").click()
    page.get_by_label("Model", exact=True).fill("qwen2.5")
    page.get_by_role("button", name="Qwen2.5-7B-Instruct", exact=False).first.wait_for()


def _deploy(page: Page) -> None:
    _find(page)
    page.locator(".candidate:enabled", has_text="Qwen/Qwen2.5-7B-Instruct").first.click()
    page.wait_for_selector(".verdict .waterfall")
    page.wait_for_timeout(400)


def _what_if(page: Page) -> None:
    page.get_by_role("button", name="Does a 7B model").click()
    page.wait_for_selector(".gpu.pair .share.fresh")


def _chat(page: Page) -> None:
    page.get_by_label("Message").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator(".message.assistant .below small").wait_for()


def _tab(name: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.locator("button.name", has_text="chat").click()
        page.get_by_role("tab", name=name).click()
        page.wait_for_timeout(600)

    return act


def _menu(page: Page) -> None:
    page.get_by_role("button", name="More actions for chat").click()


def _layout(page: Page) -> None:
    page.get_by_role("button", name="Change the layout of gpu0").click()
    page.locator("button.layout", has_text="CPX/NPS1").click()
    page.wait_for_selector(".preview .notice")


def _keys(page: Page) -> None:
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Keys").click()


def _path(page: Page) -> None:
    page.get_by_role("button", name="Path of request").first.click()
    page.wait_for_selector("dialog .path")


def _promise(page: Page) -> None:
    page.get_by_role("button", name="Add a promise to").first.click()


SHOTS = (
    Shot(name="models", height=1000),
    Shot(name="models-dark", height=1000, scheme="dark"),
    Shot(name="models-narrow", width=390, height=844),
    Shot(name="deploy", act=_deploy, height=760),
    Shot(name="what-if", path="/#/what-if", act=_what_if, height=780),
    Shot(name="chat", path="/#/chat/chat", act=_chat, scheme="dark", height=560),
    Shot(name="activity", path="/#/activity", height=1000),
    Shot(name="promises", path="/#/promises", height=720),
)

VIEWS = (
    Shot(name="models", full=True),
    *(
        Shot(name=f"drawer-{name.lower().replace(' ', '-')}", act=_tab(name))
        for name in ("Overview", "Sizing", "Placement", "Promises", "History", "Logs", "Stack entry")
    ),
    Shot(name="menu", act=_menu),
    Shot(name="keys", act=_keys),
    Shot(name="find", act=_find),
    Shot(name="deploy", act=_deploy),
    Shot(name="layout", act=_layout),
    Shot(name="what-if", path="/#/what-if", act=_what_if, full=True),
    Shot(name="chat", path="/#/chat/chat", act=_chat),
    Shot(name="activity", path="/#/activity", full=True),
    Shot(name="request-path", path="/#/activity", act=_path),
    Shot(name="promises", path="/#/promises", full=True),
    Shot(name="add-promise", path="/#/promises", act=_promise),
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
    with (
        tempfile.TemporaryDirectory() as folder,
        _made_up(Path(folder)) as (url, client),
        Traffic(url, TRAFFIC),
        open_browser() as browser,
    ):
        time.sleep(WARM_UP_SECONDS)
        for shot in every_view() if given.every else SHOTS:
            if not wanted or shot.name in wanted:
                _take(browser, (url, client.make_link()), shot, target)
    return 0


@contextmanager
def _made_up(folder: Path) -> Iterator[tuple[str, DaemonClient]]:
    """`make up` in the background, until the pictures are taken."""
    home = Home(folder / "home")
    environment = {**os.environ, "AIMGPU_HOME": str(home.path)}
    _run(["make", "--no-print-directory", "up", f"ARGS=--detach --port {_port()}"], environment)
    try:
        record = home.read_daemon()
        if record is None:
            raise SystemExit(f"`make up` left no daemon in {home.path}")
        yield record.url, DaemonClient(record.url, home.read_token())
    finally:
        _run([str(ROOT / ".venv/bin/aimgpu"), "down"], environment)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    subprocess.run(command, cwd=ROOT, env=environment, check=True)  # noqa: S603 -- our own two commands


def _port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _take(browser: Browser, address: tuple[str, str], shot: Shot, target: Path) -> None:
    url, link = address  # the link lets this browser change things
    context = browser.new_context(viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme)
    context.set_default_timeout(MOST_MS)
    page = context.new_page()
    page.goto(link)
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
