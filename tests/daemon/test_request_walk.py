"""Which modules one request to a model crosses. `python -m tests.daemon.test_request_walk` writes the page from a real run."""

import json
import tempfile
import urllib.request
from pathlib import Path

from tests.daemon.running import ROOT, TestDaemon, apply, stack, wait_for

from aimgpu.keyfile import KeyStore

PAGE = ROOT / "docs" / "explanation" / "walk-request.md"
MAY_CROSS = {"gateway", "qos", "engines", "domain"}  # domain: the types that all of them share
LEAVES = {"units", "errors", "files", "procfs", "logs", "settings", "home", "keyfile"}


class TracedDaemon(TestDaemon):
    program = "tests.programs.traced_daemon"


def test_a_request_crosses_the_gateway_and_what_is_below_it_only(tmp_path: Path) -> None:
    modules = walk(tmp_path)
    assert {"gateway.application", "gateway.proxy", "gateway.auth", "qos.queueing.dispatcher"} <= set(modules)
    assert {module for module in modules if module.split(".")[0] not in MAY_CROSS | LEAVES} == set()


def test_the_page_shows_the_walk_as_it_is(tmp_path: Path) -> None:
    assert read_page() == walk(tmp_path), "run `python -m tests.daemon.test_request_walk`"


def walk(folder: Path) -> list[str]:
    """The modules that a chat request and a streamed one enter, in the real daemon with a fake engine."""
    daemon = TracedDaemon(folder / "home")
    daemon.set(AIMGPU_TEST_WALK=str(folder / "walk.json"))
    daemon.home.create()
    key = KeyStore(daemon.home.keys_file).add("caller")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        client = daemon.start()
        apply(client, stack(chat={"slo": {"ttft_p95": "500ms"}}))
        url = f"{client.read_status()['models_url']}/chat/completions"
        ask(url, headers)
        begin = folder / "walk.json.begin"
        begin.touch()
        wait_for(lambda: not begin.exists(), "it traces")
        ask(url, headers)
    finally:
        daemon.stop()
    return sorted(json.loads((folder / "walk.json").read_text()))


def ask(url: str, headers: dict[str, str]) -> None:
    for stream in (False, True):
        body = json.dumps({"model": "chat", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as answer:
            assert answer.read()


def read_page() -> list[str]:
    lines = PAGE.read_text().splitlines()
    return [line.removeprefix("- `").removesuffix("`") for line in lines if line.startswith("- `")]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        modules = walk(Path(folder))
    lines = "\n".join(f"- `{module}`" for module in modules)
    PAGE.write_text(
        "# The modules that one request crosses\n\n"
        "Traced in the running daemon while it served one chat request and one streamed one; a test checks that this list is\n"
        "complete, and that no module of `daemon`, `control`, `ledger`, `hardware`, `monitoring` or `web` is in it. For an\n"
        "instance whose GPU is gated, `isolation.critical_signal` is entered twice more: one write to shared memory when the\n"
        "request goes to the engine, and one when it ends.\n\n"
        f"{lines}\n"
    )


if __name__ == "__main__":
    main()
