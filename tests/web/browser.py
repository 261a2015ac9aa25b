"""A real Chromium, where there is one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MILLISECONDS = 300_000  # for a machine that does much else; nothing that works comes near it
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
expect.set_options(timeout=PATIENCE_MILLISECONDS)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """The system's own: nothing is downloaded."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page whose every request and complaint is noted."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.foreign: list[str] = []
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self._complain(message.type, message.text))
        page.route("**/*", self._note)

    def _complain(self, kind: str, text: str) -> None:
        if kind == "error" and "Failed to load resource" not in text:  # an answer of 4xx, which the page shows itself
            self.errors.append(text)

    def _note(self, route: Route) -> None:
        url = route.request.url
        if not url.startswith((self.origin, "data:")):
            self.foreign.append(url)
        route.continue_()


def open_page(browser: Browser, link: str, path: str = "/", *, width: int = 1280, height: int = 900) -> Watched:
    """`link`: the one-time link that lets this browser change things, or the plain address of the page."""
    url = "/".join(link.split("/")[:3])
    context = browser.new_context(
        viewport={"width": width, "height": height}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    watched = Watched(context.new_page(), url)
    watched.page.goto(link)
    if path != "/":
        watched.page.goto("about:blank")  # else the page would not be loaded again, and only its view would change
        watched.page.goto(url + path)
    watched.page.wait_for_selector(".connection.live")
    return watched
