"""The page of the chart's values: each value with its type, default and the comment that stands with it."""

import sys
from pathlib import Path

import pytest
import yaml
from tools import chart_values, generate_reference
from tools.chart_values import read_values
from tools.generate_chart import CHART

TEXT = """\
# The first part.
first:
  # Merged into
  # the pod.
  pod:
    labels: {a: "#1"}
  # Above.
  port: 80   # and beside
  # Detached.

  name: "a # b"  # in quotes
  none: ""
second:
  pod: {}
  tls:
    secret: ""  # deep
  map: {a: 1}  # one value
"""


def test_a_meaning_is_the_comment_above_a_value_and_the_one_beside_it() -> None:
    values = {value.path: value for value in read_values(TEXT, {})}
    assert {path: value.meaning for path, value in values.items()} == {
        "first": "The first part.",
        "first.pod": "Merged into the pod.",
        "first.port": "Above. and beside",
        "first.name": "in quotes",
        "first.none": "",
        "second": "",
        "second.pod": "Merged into the pod.",
        "second.tls": "",
        "second.tls.secret": "deep",
        "second.map": "one value",
    }
    assert values["first.pod"].default == {"labels": {"a": "#1"}}
    assert values["second.map"].default == {"a": 1}
    assert values["first.none"].line == 12


def test_every_default_of_the_chart_is_on_the_page() -> None:
    defaults: dict[str, object] = {}
    for value in read_values((CHART / "values.yaml").read_text(), {}):
        if not value.group:
            place = defaults
            *parts, name = value.path.split(".")
            for part in parts:
                place = place.setdefault(part, {})  # type: ignore[assignment]
            place[name] = value.default
    assert defaults == yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ("  create: true", "deviceClasses.create has no comment that says what it is"),
        ("  create: true  # meant\n  crate: true  # not meant", "deviceClasses.crate is not in values.schema.json"),
    ],
)
def test_a_value_without_a_meaning_or_unknown_to_the_schema_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], added: str, fault: str
) -> None:
    assert not chart_values.faults()
    lines = (CHART / "values.yaml").read_text().splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("  create: "))
    lines[at] = added
    (tmp_path / "values.yaml").write_text("\n".join(lines))
    (tmp_path / "values.schema.json").write_bytes((CHART / "values.schema.json").read_bytes())
    monkeypatch.setattr(chart_values, "CHART", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_reference.py", "--check"])
    assert generate_reference.main() == 1
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "cell"),
    [
        ("agent.layouts", "`none`, `vendor`, `compute`, `memory`"),
        ("agent.singleDevice", "`auto`, `true`, `false`"),
        ("gateway.service.nodePort", "`0` or 30000 to 32767"),
        ("gateway.drainSeconds", "integer, at least 0"),
        ("agent.defaultShare", r"string like `^(100%\|[1-9][0-9]?(\.[0-9]+)?%\|0\.[0-9]*[1-9])$`"),
        ("gateway.shortNames", r"list of strings like `^(\*\|NAME)$`"),
        ("agent.extraArgs", "list of strings"),
        ("commonLabels", "map of strings"),
        ("admission.resources", "map of `requests`, `limits`, `claims`"),
    ],
)
def test_the_page_says_what_a_value_may_be(path: str, cell: str) -> None:
    assert f"\n| `{path}` | {cell} | `" in chart_values.page()
