"""The dashboards and rules as they are shipped, expression by expression."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
CHART_FILES = ROOT / "deploy" / "helm" / "aim-gpu-sharing" / "files"
RULES = CHART_FILES / "alerts.yaml"
RULE_TESTS = Path(__file__).with_name("alerts.test.yml")
SELECTORS = ("node", "gpu", "model")


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((CHART_FILES / "dashboards").glob("*.json"))]


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All of them, also those inside rows."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def panel_queries() -> list[tuple[str, str]]:
    """Where it stands, and the expression with its variables filled in as Grafana would for "All"."""
    return [
        (f"{board['uid']}: {panel['title']}", fill_in(target["expr"]))
        for board in boards()
        for panel in panels(board)
        for target in panel.get("targets") or ()
    ]


def fill_in(expression: str) -> str:
    text = expression.replace("$__rate_interval", "20s").replace("$__interval", "5s")
    for name in SELECTORS:
        text = text.replace(f'"${name}"', '".*"')
    assert "$" not in text, expression
    return text


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
