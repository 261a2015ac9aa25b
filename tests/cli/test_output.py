import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import pytest

from aimgpu.cli.main import run_command
from aimgpu.cli.output import Cell, Column, print_json, print_table, table_width
from aimgpu.cli.views.status import print_failure


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    names: frozenset[str]
    path: Path


def test_a_table_without_a_terminal_is_plain_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", Column("memory", right=True)], [("chat", Cell("24GiB", "green")), ("x", "8B")], title="models")
    assert capsys.readouterr().out == "models\nname  memory\nchat   24GiB\nx         8B\n"


def test_a_table_on_a_terminal_shows_text_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table(["name"], [("[bold]not markup[/bold]",)])
    assert "[bold]not markup[/bold]" in capsys.readouterr().out


def test_a_narrow_terminal_gets_whole_cells_of_the_columns_that_matter_most(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    columns = [Column("NAME", fold=False), Column("ENGINE", fold=False, drop=1), Column("ENDPOINT", fold=False, drop=2)]
    rows = [("chat", "llamacpp", "http://127.0.0.1:8080/v1")]
    shown = {}
    for width in (80, 30, 10):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(columns, rows)
        shown[width] = capsys.readouterr().out
    assert "ENDPOINT" in shown[80].splitlines()[0]
    assert "Not shown" not in shown[80]
    assert "llamacpp" in shown[30]
    assert "http:" not in shown[30]
    assert "Not shown on a terminal this narrow: ENDPOINT (" in shown[30]
    assert "Not shown on a terminal this narrow: ENDPOINT, ENGINE (" in shown[10]
    assert "chat" in shown[10]


def test_a_plan_on_a_narrow_terminal_gives_each_reason_once_below_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    (tmp_path / "stack.yaml").write_text("models: {chat: {model: Qwen/Qwen2.5-0.5B-Instruct, gpu: {memory: 9GB}, replicas: 3}}")
    shown = {}
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run_command(["plan", "-f", str(tmp_path / "stack.yaml"), "--gpu", "MI300X"]) == 0
        shown[width] = capsys.readouterr().out
    assert "BECAUSE" in shown[200]
    assert "BECAUSE" not in shown[80]
    assert shown[80].count("\nWhy chat-0") == 1
    assert "chat-0, chat-1, chat-2: " in shown[80]  # what they serve


def test_json_knows_our_types(capsys: pytest.CaptureFixture[str]) -> None:
    value = Outer(inner=Inner(colour=Colour.RED), names=frozenset({"b", "a"}), path=Path("/x"))
    print_json({"one": value, "map": MappingProxyType({"k": 1})})
    assert json.loads(capsys.readouterr().out) == {
        "one": {"inner": {"colour": "red"}, "names": ["a", "b"], "path": "/x"},
        "map": {"k": 1},
    }


def test_json_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        print_json(object())


def test_the_width_of_a_table_is_that_of_its_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("name"), Column("x")]
    rows: list[tuple[str | Cell, ...]] = [("chat", "24GiB"), ("a longer one", Cell("1", "red"))]
    print_table(columns, rows)
    assert table_width(columns, rows) == max(map(len, capsys.readouterr().out.splitlines()))


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("waits for room, next try in 2 s: full", "chat waits for room, next try in 2 s: full"),
        ("failed 3 times and is not tried again: died", "chat failed 3 times and is not tried again: died"),
        ("full", "chat waits for room: full"),
    ],
)
def test_what_a_queued_model_waits_for_is_said_once(reason: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_failure("chat", {"state": "queued", "reason": reason})
    assert capsys.readouterr().err == f"{shown}\n"
