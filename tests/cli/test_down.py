"""`down` ends what runs, whatever has become of the daemon's files."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.daemon.running import TestDaemon, apply, stack

from aimgpu.cli.commands.serve.down import down


def make_it_newer(ledger: Path) -> None:
    with sqlite3.connect(ledger) as database:
        database.execute("PRAGMA user_version = 999999")


def make_it_a_folder(ledger: Path) -> None:
    ledger.unlink()
    ledger.mkdir()


def damage_the_keys(ledger: Path) -> None:
    (ledger.parent / "keys.json").write_text("{")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    made = TestDaemon(tmp_path / "home")
    yield made
    for process in made.launcher.find_started().values():
        made.launcher.stop(process, grace_seconds=0)


@pytest.mark.parametrize("harm", [make_it_newer, make_it_a_folder, damage_the_keys])
def test_models_are_stopped_although_the_files_are_not_what_they_were(
    daemon: TestDaemon, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    apply(daemon.start(), stack(chat={}, code={}))
    daemon.kill()
    for leftover in daemon.home.path.glob("ledger.sqlite3-*"):
        leftover.unlink()
    harm(daemon.home.ledger_file)
    assert len(daemon.launcher.find_started()) == 2
    monkeypatch.setenv("AIMGPU_HOME", str(daemon.home.path))
    done = CliRunner().invoke(down, [])
    assert done.exit_code == 0, done.output
    assert daemon.launcher.find_started() == {}
    shutil.rmtree(daemon.home.ledger_file, ignore_errors=True)
