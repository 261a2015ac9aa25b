"""The page in Chromium with canned answers and no server: for what is tedious to bring about, as many models or a cluster."""

import json
from collections.abc import Mapping
from typing import Any

from playwright.sync_api import Browser, Page, Route
from tests.web.browser import PATIENCE_MILLISECONDS

from aimgpu.web.assets import SAFETY_HEADERS, find_asset

ORIGIN = "http://localhost:9"
SESSION = {"read": True, "write": True, "reason": None, "keys_required": False}
# A stream that stays open; each tab would else connect again and again.
_STREAM = """events => {
  const plain = window.fetch;
  window.fetch = (url, options) => String(url).endsWith("/api/v1/events")
    ? Promise.resolve(new Response(new ReadableStream({ start(to) {
        window.push = (text) => to.enqueue(new TextEncoder().encode(text));
        window.push(events);
      } })))
    : plain(url, options);
}"""


class CannedPage:
    """`answers`: by "METHOD /path", the status and the JSON; what is asked is noted in `asked`."""

    def __init__(self, browser: Browser, state: Mapping[str, Any], answers: Mapping[str, tuple[int, Any]], width: int) -> None:
        self.answers = {"GET /api/v1/session": (200, SESSION), **answers}
        self.asked: list[tuple[str, Any]] = []
        self.errors: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900 if width > 500 else 844})
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        self.page: Page = context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        sections = {**state, "history": [], "requests": [], "journal": []}
        events = "".join(write_event(name, body) for name, body in sections.items())
        self.page.add_init_script(f"({_STREAM})({json.dumps(events)})")
        self.page.route("**/*", self._answer)

    def open(self, path: str = "/") -> Page:
        self.page.goto(ORIGIN + path)
        self.page.wait_for_selector(".connection.live")
        return self.page

    def push(self, name: str, body: Any) -> None:
        """An event of the stream."""
        self.page.evaluate("text => window.push(text)", write_event(name, body))

    def close(self) -> None:
        self.page.context.close()
        assert self.errors == []

    def _answer(self, route: Route) -> None:
        path = route.request.url.removeprefix(ORIGIN)
        asset = find_asset(path)
        if asset is not None:
            route.fulfill(body=asset.body, headers={**SAFETY_HEADERS, "content-type": asset.media_type})
            return
        key = f"{route.request.method} {path}"
        self.asked.append((key, json.loads(route.request.post_data) if route.request.post_data else None))
        status, body = self.answers.get(key, (404, {"error": {"message": f"nothing at {key}", "code": "not_found"}}))
        text = body if isinstance(body, str) else json.dumps(body)
        route.fulfill(status=status, body=text, headers={**SAFETY_HEADERS, "content-type": "application/json"})


def write_event(name: str, body: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(body)}\n\n"
