"""A real Prometheus scrapes the running daemon under load, and every expression that is shipped is evaluated in it."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.waiting import wait_for
from tests.monitoring.dashboards import boards, panel_queries, rules
from tests.monitoring.prometheus_server import PROMETHEUS, Prometheus
from tests.web.scene import PageDaemon, Traffic, show

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's prometheus package")

# Nothing of these can be there in this test, and why.
NO_DATA = {
    "aim_model_allocations_refused_total": "simulated GPUs have no interposer",
    "aim_model_gate_wait_seconds_total": "simulated GPUs have no interposer",
    "aim_model_gate_yield_ratio": "simulated GPUs have no interposer",
    "aim_model_gate_yielded_seconds_total": "simulated GPUs have no interposer",
    "aim_model_gate_cost_ratio": "no model there shares by promise",
    "aim_model_gate_held_seconds_total": "simulated GPUs have no interposer",
    "aim_model_gate_longest_launch_seconds": "simulated GPUs have no interposer",
    "aim_model_gate_requests_total": "simulated GPUs have no interposer",
    "aim_model_gate_touched_requests_total": "simulated GPUs have no interposer",
    "aim_scheduler_low_share": "only there while a promise is being broken for a while",
}
QUICK = ("--first-token-seconds", "0.01", "--token-seconds", "0.005", "--tokens", "24")
MODEL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "context": 2048, "concurrency": 2}
SCRAPES = 3  # a rate has data then; what takes longer is waited for


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
    assert [one["value"][1] for one in prometheus.wait_for_data('up{job="aimgpu"} == 1')] == ["1"]
    assert prometheus.wait_for_data('scrape_samples_post_metric_relabeling{job="aimgpu"} > 100')


@pytest.mark.parametrize(("where", "expression"), panel_queries())
def test_a_panel_has_data_or_a_named_reason_for_having_none(prometheus: Prometheus, where: str, expression: str) -> None:
    reasons = [reason for name, reason in NO_DATA.items() if name in expression]
    if reasons:
        assert not prometheus.query(expression), f"{where} has data although {reasons[0]}: take it off the list"
        return
    wait_for(lambda: prometheus.query(expression), lambda found: any(one["value"][1] != "NaN" for one in found), where)


@pytest.mark.parametrize("rule", [rule for rule in rules() if "record" in rule], ids=lambda rule: rule["record"])
def test_a_recording_rule_records(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    if rule["record"] == "aim:model_failures:ratio_rate5m":
        assert prometheus.query(rule["expr"]) == [], "no request failed"
        return
    assert prometheus.wait_for_data(rule["record"])


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    def is_evaluated(found: dict[str, dict[str, Any]]) -> bool:
        return all(rule["health"] != "unknown" for rule in found.values())

    found = wait_for(prometheus.rules, is_evaluated, "every rule is evaluated once")
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
