"""Answers that save a search: what a key locks, a count without its unit, a number that is none, a group without a command."""

from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.errors import InvalidInput, InvalidStackFile


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    return tmp_path


def test_the_first_key_says_what_it_locks_and_how_to_undo_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["keys", "add", "alice"]) == 0
    said = capsys.readouterr().err
    assert "From now on every caller needs a key, also on this machine" in said
    assert "`aimgpu keys remove alice`" in said
    assert run_command(["keys", "add", "bob"]) == 0
    assert "From now on" not in capsys.readouterr().err


@pytest.mark.parametrize(("given", "meant"), [("7", "7B"), ("135", "135B")])
def test_a_count_of_parameters_without_its_unit_is_asked_about(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["catalogue", "add", "acme/model", "--parameters", given]) == InvalidInput.exit_status
    assert f"hint: Did you mean `aimgpu catalogue add acme/model --parameters {meant}`?" in capsys.readouterr().err
    assert run_command(["catalogue", "add", "acme/model", "--parameters", meant]) == 0


def test_a_port_of_the_environment_that_is_no_number_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIMGPU_PORT", "80a")
    assert run_command(["up"]) == 2
    said = capsys.readouterr().err
    assert "AIMGPU_PORT" in said
    assert "'80a' is not a whole number" in said


def test_a_group_without_a_command_shows_its_help_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["keys"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("Usage: aimgpu keys")
    assert err == ""


@pytest.mark.parametrize("text", [None, ""])
def test_a_stack_file_that_is_missing_or_empty_names_no_file_of_a_checkout(
    text: str | None, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "stack.yaml"
    if text is not None:
        path.write_text(text)
    assert run_command(["up", "-f", str(path)]) == InvalidStackFile.exit_status
    said = capsys.readouterr().err
    assert "examples/" not in said
    assert "`aimgpu up --example`" in said
