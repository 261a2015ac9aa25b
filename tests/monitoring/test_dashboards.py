"""Dashboards and rules without a Prometheus: their schema, their names, their texts."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from tests.monitoring.dashboards import CHART_FILES, ROOT, RULE_TESTS, RULES, SELECTORS, boards, panel_queries, panels, rules
from tools.dashboard_boards import BOARDS
from tools.dashboards import build

from aimgpu.monitoring.metrics import METRICS, MetricKind

PANEL_TYPES = {
    "timeseries",
    "stat",
    "bargauge",
    "table",
    "status-history",
    "row",
}  # current ones: no graph, singlestat, table-old
_NAME = re.compile(r"\b(aim_[a-z0-9_]+)\b")
_BY = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(aim_[a-z0-9_]+)\{([^}]*)\}")


def test_the_files_are_what_the_sdk_makes_of_the_boards() -> None:
    assert sorted(path.stem for path in (CHART_FILES / "dashboards").glob("*.json")) == sorted(board.uid for board in BOARDS)
    for board in BOARDS:
        assert json.loads((CHART_FILES / "dashboards" / f"{board.uid}.json").read_text()) == build(board), "run `make docs`"


@pytest.mark.parametrize("board", boards(), ids=lambda board: board["uid"])
def test_grafanas_sdk_knows_every_key_of_a_dashboard(board: dict[str, Any]) -> None:
    """What the SDK does not know is dropped on the way through it."""
    register_default_plugins()
    through = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(json.loads(json.dumps(board)))))
    assert _keys(board) <= _keys(through)


def _keys(value: object, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {f"{path}/{key}" for key in value}.union(*(_keys(one, f"{path}/{key}") for key, one in value.items()))
    if isinstance(value, list):
        return set().union(*(_keys(one, f"{path}[]") for one in value)) if value else set()
    return set()


@pytest.mark.parametrize("board", boards(), ids=lambda board: board["uid"])
def test_a_dashboard_loads_anywhere(board: dict[str, Any]) -> None:
    """No data source, folder or id of one Grafana is in it; panels have places that do not overlap."""
    assert board.get("id") is None
    assert re.fullmatch(r"[a-z-]{4,40}", board["uid"])
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", *SELECTORS]
    assert variables["datasource"]["type"] == "datasource"
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels(board)]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        assert panel["type"] in PANEL_TYPES, panel["title"]
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets") or ():
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def exported_names() -> set[str]:
    found = set()
    for metric in METRICS.values():
        if metric.kind is MetricKind.HISTOGRAM:
            found |= {f"{metric.name}_{end}" for end in ("bucket", "sum", "count")}
        else:
            found.add(f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name)
    return found


def labels_of(name: str) -> set[str]:
    base = re.sub(r"_(total|bucket|sum|count)$", "", name)
    metric = METRICS.get(name) or METRICS[base]
    return {*metric.labels, "le"}


def expressions() -> list[tuple[str, str]]:
    return [*panel_queries(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_an_expression_uses_only_metrics_and_labels_that_are_exported(where: str, expression: str) -> None:
    names = set(_NAME.findall(expression))
    assert names, where
    assert names <= exported_names(), where
    known = set().union(*map(labels_of, names))
    for group in _BY.findall(expression):
        assert {label.strip() for label in group.split(",")} <= known, where
    for name, matchers in _SELECTOR.findall(expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= labels_of(name), where


def test_every_metric_that_a_person_would_look_for_is_on_a_dashboard() -> None:
    shown = {name for _, expression in panel_queries() for name in _NAME.findall(expression)}
    bases = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown} | shown
    unseen = {name for name in METRICS if name not in bases}
    assert unseen <= {
        "aim_model_gate_overruns",
        "aim_model_gpu_seconds",
        "aim_model_isolation_met",
        "aim_model_memory_used_bytes",
        "aim_engine_preemptions",
        "aim_engine_prefix_cache_hits",
        "aim_engine_prefix_cache_queries",
        "aim_exporter_dropped_series",
    }


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_a_runbook_that_exists_and_a_test_that_fires_it(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = [line[3:].strip().lower() for line in (ROOT / path).read_text().splitlines() if line.startswith("## ")]
    assert anchor in headings
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ()) if case["alertname"] == rule["alert"]]
    assert any(case["exp_alerts"] for case in cases), "it is never seen to fire"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus package")
@pytest.mark.parametrize(
    "command", [("check", "rules", str(RULES)), ("test", "rules", str(RULE_TESTS))], ids=lambda one: one[0]
)
def test_promtool_accepts_the_rules_and_their_tests(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
