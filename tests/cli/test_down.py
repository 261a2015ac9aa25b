"""`down` ends what runs, whatever has become of the daemon's files."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.daemon.running import TestDaemon, apply, stack

from aimgpu.cli.commands.serve.down import down
from aimgpu.errors import OtherLedgerSchema


def give_it_another_schema(ledger: Path) -> None:
    with contextlib.closing(sqlite3.connect(ledger)) as database:
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


@pytest.mark.parametrize("harm", [give_it_another_schema, make_it_a_folder, damage_the_keys])
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


def test_what_another_build_left_is_ended_and_the_next_daemon_begins_anew(
    daemon: TestDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(daemon.start(), stack(chat={}))
    daemon.kill()
    give_it_another_schema(daemon.home.ledger_file)
    daemon.spawn()
    assert daemon.process is not None
    assert daemon.process.wait() == OtherLedgerSchema.exit_status
    assert "`aimgpu down` stops what that build left running" in daemon.log.read_text()
    assert len(daemon.launcher.find_started()) == 1
    monkeypatch.setenv("AIMGPU_HOME", str(daemon.home.path))
    done = CliRunner().invoke(down, [])
    assert (done.exit_code, done.stdout) == (0, "Stopped.\n")
    assert "ledger.sqlite3.schema-1" in done.stderr
    assert daemon.launcher.find_started() == {}
    assert CliRunner().invoke(down, []).stdout == "Nothing runs.\n"
    assert daemon.start().read_status()["deployments"] == []
    daemon.stop()
