"""A real Prometheus scrapes the running daemon under load, and every expression that is shipped is evaluated in it."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from tests.daemon.running import PATIENCE_SECONDS
from tests.monitoring.dashboards import RULES, boards, panel_queries, rules
from tests.web.scene import PageDaemon, Traffic, show

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus package")

# Nothing of these can be there in this test, and why.
NO_DATA = {
    "aim_model_allocations_refused_total": "simulated GPUs have no interposer",
    "aim_model_gate_wait_seconds_total": "simulated GPUs have no interposer",
    "aim_model_gate_yield_ratio": "simulated GPUs have no interposer",
    "aim_model_gate_held_seconds_total": "simulated GPUs have no interposer",
    "aim_model_gate_longest_launch_seconds": "simulated GPUs have no interposer",
    "aim_model_gate_requests_total": "simulated GPUs have no interposer",
    "aim_model_gate_touched_requests_total": "simulated GPUs have no interposer",
    "aim_scheduler_low_share": "only there while a promise is being broken for a while",
}
QUICK = ("--first-token-seconds", "0.01", "--token-seconds", "0.005", "--tokens", "24")
MODEL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "context": 2048, "concurrency": 2}
SCRAPES = 12


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self.url = f"http://127.0.0.1:{_free_port()}"
        (folder / RULES.name).write_text(RULES.read_text())
        scrape = {"job_name": "aimgpu", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [scrape],
            "rule_files": [RULES.name],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))

    def __enter__(self) -> Self:
        arguments = [
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self._get("/api/v1/query", {"query": expression})["result"])

    def label_values(self, label: str, match: str) -> list[str]:
        found = self._get(f"/api/v1/label/{label}/values", {"match[]": match})
        return [str(one) for one in found]

    def alerts(self) -> list[dict[str, Any]]:
        return list(self._get("/api/v1/rules", {})["groups"])

    def _get(self, path: str, query: dict[str, str]) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}") as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from error

    def wait_for_scrapes(self, count: int) -> None:
        """Until it has read the daemon so many times."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                found = self.query('count_over_time(up{job="aimgpu"}[10m])')
            except (OSError, AssertionError):
                found = []
            if found and int(float(found[0]["value"][1])) >= count:
                return
            time.sleep(0.2)
        raise AssertionError((self._folder / "log").read_text()[-2000:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    daemon = PageDaemon(tmp_path_factory.mktemp("daemon") / "home", engines={"chat": QUICK, "code": QUICK}, grace_seconds=0.5)
    client = daemon.start()
    folder = tmp_path_factory.mktemp("prometheus")
    slo = {"ttft_p95": "2s", "tpot_p95": "200ms", "availability": "99%"}
    try:
        show(client, {"chat": {**MODEL, "slo": slo}, "code": MODEL})
        show(client, {"huge": {"model": "meta-llama/Llama-3.1-405B-Instruct", "engine": "vllm"}})  # refused
        with Traffic(daemon.url, [("chat", 2, 0.05), ("code", 2, 0.1)]), Prometheus(folder, daemon.url) as found:
            found.wait_for_scrapes(SCRAPES)
            yield found
    finally:
        daemon.stop()


def test_the_target_is_up_and_nothing_of_the_scrape_was_refused(prometheus: Prometheus) -> None:
    assert [one["value"][1] for one in prometheus.query('up{job="aimgpu"}')] == ["1"]
    assert prometheus.query('scrape_samples_post_metric_relabeling{job="aimgpu"} > 100')


@pytest.mark.parametrize(("where", "expression"), panel_queries())
def test_a_panel_has_data_or_a_named_reason_for_having_none(prometheus: Prometheus, where: str, expression: str) -> None:
    found = prometheus.query(expression)
    reasons = [reason for name, reason in NO_DATA.items() if name in expression]
    if reasons:
        assert not found, f"{where} has data although {reasons[0]}: take it off the list"
    else:
        assert found, where
        assert any(one["value"][1] != "NaN" for one in found), where


@pytest.mark.parametrize("rule", [rule for rule in rules() if "record" in rule], ids=lambda rule: rule["record"])
def test_a_recording_rule_records(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    if rule["record"] == "aim:model_failures:ratio_rate5m":
        assert prometheus.query(rule["expr"]) == [], "no request failed"
        return
    assert prometheus.query(rule["record"])


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    found = {rule["name"]: rule for group in prometheus.alerts() for rule in group["rules"]}
    assert set(found) == {rule.get("alert") or rule["record"] for rule in rules()}
    assert {name: rule["health"] for name, rule in found.items() if rule["health"] != "ok"} == {}
    firing = {name for name, rule in found.items() if rule.get("state") == "firing"}
    assert firing <= {"AimPlacementRefused"}, "a model was refused; everything else is well"


@pytest.mark.parametrize("name", ["node", "gpu", "model"])
def test_the_selectors_of_the_dashboards_find_something(prometheus: Prometheus, name: str) -> None:
    (query,) = {
        one["query"] if isinstance(one["query"], str) else one["query"]["query"]
        for board in boards()
        for one in board["templating"]["list"]
        if one["name"] == name
    }
    inside = query.removeprefix("label_values(").removesuffix(")")
    match, _, label = inside.rpartition(",")
    assert label.strip() == name
    assert prometheus.label_values(name, match.replace('"$node"', '".*"'))
