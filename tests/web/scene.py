"""A daemon with a few models and some traffic, for the browser tests and the screenshots."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.daemon.running import TestDaemon, wait_for

from aimgpu.cli.client import DaemonClient
from aimgpu.units import GIB

SMALL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "context": 2048}
QUICK = ("--first-token-seconds", "0.02", "--token-seconds", "0.005", "--tokens", "24")


class PageDaemon(TestDaemon):
    """Two simulated MI300X that measure, and engines named vllm and llamacpp that stream words."""

    program = "tests.programs.page_daemon"
    count = 2

    def spawn(self) -> None:
        self.arguments = ("--simulate", "MI300X", "--count", str(self.count))
        super().spawn()

    @property
    def url(self) -> str:
        record = self.home.read_daemon()
        assert record is not None
        return record.url

    def link(self) -> str:
        """Opens the page for changes, in one browser."""
        return DaemonClient(self.url, self.home.read_token()).make_link()


def show(client: DaemonClient, models: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Deploy, and wait until they are up."""
    return list(client.apply(json.dumps({"models": models}), "/"))


def ask(url: str, model: str, *, tokens: int = 24, stream: bool = True, prompt: str = "hello") -> int:
    """One chat request; returns its status."""
    body = {"model": model, "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}]}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


class Traffic:
    """Callers that ask in turn until they are stopped."""

    def __init__(self, url: str, plan: Sequence[tuple[str, int, float]]) -> None:
        """`plan`: model, callers, seconds between their requests."""
        self._url = url
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(model, pause), daemon=True)
            for model, callers, pause in plan
            for _ in range(callers)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, model: str, pause: float) -> None:
        while not self._stopped.is_set():
            ask(self._url, model)
            self._stopped.wait(pause)


def put_foreign_process(home: Path, device: str, *, pid: int, memory_bytes: int = 6 * GIB) -> None:
    """Someone else's process on a simulated GPU."""
    path = home / "simulated-gpus.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    state["foreign"] = [{"device": device, "pid": pid, "name": "python", "memory_bytes": memory_bytes}]
    path.write_text(json.dumps(state))


__all__ = ["QUICK", "SMALL", "PageDaemon", "Traffic", "ask", "put_foreign_process", "show", "wait_for"]
