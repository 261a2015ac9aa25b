"""Draw the Grafana dashboards in Perses, with what a real Prometheus scraped of a running daemon, and take pictures of them.

`python -m tools.dashboard_pictures FOLDER` needs Debian's chromium and prometheus, and a FOLDER with `perses` (the server) and
`plugins/`; docs/how-to/watch-with-prometheus.md says what was used. Perses migrates the dashboards itself and refuses what its
schemas do not know. It is not Grafana: a picture shows that a panel has data and reads well, not how Grafana draws it.
The scene is staged: two simulated GPUs, and engines named vllm that stream words.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser
from tests.monitoring.dashboards import boards
from tests.monitoring.prometheus_server import PROMETHEUS, Prometheus, free_port
from tests.web.browser import CHROMIUM, open_browser
from tests.web.scene import PageDaemon, Traffic, ask, put_foreign_process, show

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images"
PROJECT, SOURCE = "aim", "prometheus"
WIDTH, ROW_PIXELS = 1440, 42
START_SECONDS = 60.0
_MOST_MS = 180_000
_HTTP = "http://"
_JSON = {"content-type": "application/json"}

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("perses", type=Path, help="folder with the server `perses` and its `plugins/`")
    parser.add_argument("--seconds", type=float, default=240.0, help="of scraping before the pictures are taken")
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    missing = [name for name, path in (("chromium", CHROMIUM), ("prometheus", PROMETHEUS)) if path is None]
    if missing:
        print(f"missing: {', '.join(missing)} (apt-get install {' '.join(missing)})")
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        daemon = PageDaemon(Path(folder) / "home", engines=ENGINES, restart_limit=1.0, restart_delay_seconds=600.0)
        client = daemon.start()
        try:
            for name, model in MODELS.items():
                show(client, {name: model})
            put_foreign_process(daemon.home.path, "sim-mi300x-1", pid=4411)
            ask(daemon.url, "embed")
            with Traffic(daemon.url, TRAFFIC), Prometheus(_new(folder, "prometheus"), daemon.url) as prometheus:
                prometheus.wait_for_scrapes(1)
                time.sleep(given.seconds)
                with _perses(given.perses.resolve(), _new(folder, "perses"), prometheus.url) as perses, open_browser() as it:
                    for board in boards():
                        _take(it, perses, board, given.out)
        finally:
            daemon.stop()
    return 0


def _new(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


@contextmanager
def _perses(program: Path, folder: Path, prometheus_url: str) -> Iterator[str]:
    """The server with an empty database, a project, and a Prometheus to ask; yields its address."""
    url = f"{_HTTP}127.0.0.1:{free_port()}"
    config = {
        "database": {"file": {"folder": str(folder / "db"), "extension": "json"}},
        "plugin": {"path": str(program / "plugins"), "archive_path": str(folder / "archive")},
        "security": {"readonly": False, "enable_auth": False},
    }
    (folder / "archive").mkdir()  # without it no plugin is loaded
    (folder / "config.yaml").write_text(json.dumps(config))
    arguments = [str(program / "perses"), f"--config={folder}/config.yaml", f"--web.listen-address={url.removeprefix(_HTTP)}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)  # noqa: S603 -- the program that was named
    try:
        _wait_for(f"{url}/api/v1/projects", process, folder / "log")
        _post(f"{url}/api/v1/projects", {"kind": "Project", "metadata": {"name": PROJECT}, "spec": {}})
        proxy = {"kind": "HTTPProxy", "spec": {"url": prometheus_url}}
        spec = {"default": True, "plugin": {"kind": "PrometheusDatasource", "spec": {"proxy": proxy}}}
        source = {"kind": "GlobalDatasource", "metadata": {"name": SOURCE}, "spec": spec}
        _post(f"{url}/api/v1/globaldatasources", source)
        yield url
    finally:
        process.terminate()
        process.wait()


def _take(browser: Browser, perses: str, board: dict[str, Any], out: Path) -> None:
    chosen = json.loads(json.dumps(board).replace("${datasource}", SOURCE))  # a choice that Perses does not migrate
    found = _post(f"{perses}/api/migrate", {"input": {}, "grafanaDashboard": chosen})
    found["metadata"] = {"name": board["uid"], "project": PROJECT}
    found["spec"]["duration"] = "5m"
    found["spec"]["variables"] = [one for one in found["spec"]["variables"] if one["spec"]["name"] != "datasource"]
    for variable in found["spec"]["variables"]:
        variable["spec"]["defaultValue"] = ["$__all"]
    _post(f"{perses}/api/v1/projects/{PROJECT}/dashboards", found)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    context = browser.new_context(viewport={"width": WIDTH, "height": 220 + rows * ROW_PIXELS})
    page = context.new_page()
    page.goto(f"{perses}/projects/{PROJECT}/dashboards/{board['uid']}?start=5m")
    page.locator(".MuiSkeleton-root").first.wait_for(timeout=_MOST_MS)
    page.wait_for_function("!document.querySelector('.MuiSkeleton-root, .MuiCircularProgress-root')", timeout=_MOST_MS)
    page.wait_for_timeout(2000)  # the charts' own animation
    path = out / f"dashboard-{board['uid'].removeprefix('aim-')}.png"
    page.screenshot(path=path, full_page=True)
    context.close()
    print(f"{path.name:32} {path.stat().st_size:>8} bytes")


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), _JSON)  # noqa: S310 -- our own server
    try:
        with urllib.request.urlopen(request) as response:  # noqa: S310
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:
        with error:
            raise SystemExit(f"{url}: {error.read().decode()[:2000]}") from error


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url):  # noqa: S310
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"Perses does not answer: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
