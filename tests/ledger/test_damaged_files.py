"""The ledger's file in every state that a crash, a bad disk or another program can leave it in."""

import contextlib
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ledger.test_ledger import CAPACITY, DEPLOYMENT, make_instance, small_disk

from aimgpu.domain import QueueSettings
from aimgpu.errors import AimGpuError, LedgerFailed, LedgerFull
from aimgpu.ledger import Ledger, Retry, has_other_schema, read_grants
from aimgpu.ledger import file as ledger_file
from aimgpu.ledger.read_only import read_deployments, read_instances

INSTANCES = 30


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A ledger with rows in every table, closed in order: all of it is in the one file."""
    path = tmp_path_factory.mktemp("written") / "l"
    fill(path).close()
    return path.read_bytes()


def fill(path: Path) -> Ledger:
    ledger = Ledger.open(path)
    ledger.want(DEPLOYMENT)
    with ledger.together():
        for number in range(INSTANCES):
            ledger.charge(make_instance(f"i{number:02d}", 1), capacity=CAPACITY)
    ledger.keep_retry(Retry(deployment="chat", reason="it died"))
    ledger.keep_queue(QueueSettings(per_gpu=3))
    ledger.keep_claim("uid-1", {"pod": "a"})
    ledger.begin("partition", {"device": "gpu"})
    return ledger


def still_works(ledger: Ledger) -> bool:
    """Something can be charged, and is there after another start."""
    ledger.charge(make_instance("later", 1), capacity=CAPACITY)
    return any(one.id == "later" for one in ledger.instances())


CUTS = [0, 1, 15, 16, 17, 99, 100, 2048, 4095, 4096, 4097, 8191, 8192]


@pytest.mark.parametrize("length", CUTS)
def test_a_file_that_was_cut_is_kept_aside_with_its_bytes_and_the_next_one_works(
    tmp_path: Path, written: bytes, length: int
) -> None:
    path = tmp_path / "l"
    path.write_bytes(written[:length])
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert ledger.instances() == ()
        if length > 1:  # next to nothing is a ledger that was not begun
            assert ledger.set_aside is not None
            assert ledger.set_aside.read_bytes() == written[:length]
        assert still_works(ledger)


@pytest.mark.parametrize("part", [0.5, 0.75, 0.99])
def test_a_file_that_lost_its_end_is_not_taken_for_a_smaller_one(tmp_path: Path, written: bytes, part: float) -> None:
    """Every instance that is missing would be a share that is given away twice."""
    path = tmp_path / "l"
    path.write_bytes(written[: int(len(written) * part)])
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is not None
        assert ledger.grants() == ()


@pytest.mark.parametrize("offset", [*range(16), *range(16, 100, 7), 100, 103, 105, 108, 120, 4096, 4097, 4100])
def test_a_byte_that_turned_is_read_around_or_the_file_kept_aside_and_nothing_half_believed(
    tmp_path: Path, written: bytes, offset: int
) -> None:
    path = tmp_path / "l"
    path.write_bytes(written[:offset] + bytes([written[offset] ^ 0xFF]) + written[offset + 1 :])
    with contextlib.closing(Ledger.open(path)) as ledger:
        held = len(ledger.instances())
        assert held == len(ledger.grants())
        assert held == (INSTANCES if ledger.set_aside is None else 0)
        assert still_works(ledger)


BODIES = {
    "empty": "",
    "no JSON": "not json",
    "cut": '{"id": "i0',
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "a text": '"i00"',
    "of other types": '{"id": 1, "name": 1, "deployment": 2, "reason": 3, "per_gpu": "many"}',
    "not a number": '{"per_gpu": "many"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("table", ["deployments", "instances", "grants", "retries", "settings"])
def test_one_row_that_cannot_be_read_sets_the_whole_file_aside(tmp_path: Path, written: bytes, table: str, body: str) -> None:
    """What is charged by a row that cannot be read cannot be given back; nothing of the file is believed."""
    path = tmp_path / "l"
    path.write_bytes(written)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        where = " AND name = 'queue'" if table == "settings" else ""
        connection.execute(f"UPDATE {table} SET body = ? WHERE rowid IN (SELECT rowid FROM {table} LIMIT 2){where}", (body,))  # noqa: S608
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is not None
        assert (ledger.deployments(), ledger.instances(), ledger.retries()) == ((), (), ())
        assert ledger.queue() == QueueSettings()
        assert still_works(ledger)


@pytest.mark.parametrize("table", ["operations", "claims"])
@pytest.mark.parametrize("body", ["", "{", "nothing"])
def test_an_operation_or_claim_that_is_no_json_sets_the_file_aside(
    tmp_path: Path, written: bytes, table: str, body: str
) -> None:
    path = tmp_path / "l"
    path.write_bytes(written)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET body = ?", (body,))  # noqa: S608
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is not None
        assert (ledger.operations(), ledger.claims()) == ((), {})


@pytest.mark.parametrize("table", ["instances", "grants", "retries", "claims", "settings"])
def test_a_file_without_one_of_its_tables_is_no_ledger(tmp_path: Path, written: bytes, table: str) -> None:
    path = tmp_path / "l"
    path.write_bytes(written)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"DROP TABLE {table}")
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is not None
        assert still_works(ledger)


def test_the_database_of_another_program_is_kept_and_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE instances (photo BLOB)")
        connection.execute("INSERT INTO instances VALUES (x'00')")
    before = path.read_bytes()
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is not None
        assert ledger.set_aside.read_bytes() == before
        assert still_works(ledger)


def test_files_that_are_set_aside_one_after_the_other_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "l"
    for number in range(1, 4):
        path.write_bytes(f"damage {number}".encode() * 100)
        with contextlib.closing(Ledger.open(path)) as ledger:
            assert ledger.set_aside == tmp_path / f"l.corrupt-{number}"
    kept = {file.name: file.read_bytes()[:8] for file in tmp_path.glob("l.corrupt-?")}
    assert kept == {f"l.corrupt-{number}": f"damage {number}".encode() for number in range(1, 4)}


# --- the write-ahead log ---


@pytest.fixture(scope="module")
def in_the_log(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """File and log of a daemon that was killed: some of what it wrote is in the log alone."""
    path = tmp_path_factory.mktemp("log") / "l"
    with contextlib.closing(Ledger.open(path)) as ledger:
        for number in range(8):
            ledger.charge(make_instance(f"i{number}", 1), capacity=CAPACITY)
        return {name: (path.parent / name).read_bytes() for name in ("l", "l-wal")}


def restored(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / "l"


def test_what_is_in_the_log_alone_is_read(tmp_path: Path, in_the_log: dict[str, bytes]) -> None:
    with contextlib.closing(Ledger.open(restored(tmp_path, in_the_log))) as ledger:
        assert [one.id for one in ledger.instances()] == [f"i{number}" for number in range(8)]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
@pytest.mark.parametrize("how", ["cut", "turned"])
def test_of_a_damaged_log_a_beginning_is_read_and_no_transaction_by_half(
    tmp_path: Path, in_the_log: dict[str, bytes], part: float, how: str
) -> None:
    log = in_the_log["l-wal"]
    at = int(len(log) * part)
    damaged = log[:at] if how == "cut" else log[:at] + bytes([log[at] ^ 0xFF]) + log[at + 1 :]
    with contextlib.closing(Ledger.open(restored(tmp_path, in_the_log | {"l-wal": damaged}))) as ledger:
        found = [one.id for one in ledger.instances()]
        assert found == [f"i{number}" for number in range(len(found))]
        assert [grant.instance_id for grant in ledger.grants()] == found
        assert still_works(ledger)


# --- where it cannot be opened ---


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def below_a_file(path: Path) -> Path:
    path.write_text("a file")
    return path / "ledger"


@pytest.mark.parametrize("prepare", [make_folder, below_a_file])
def test_a_place_where_no_file_can_be_is_refused_by_name_with_what_to_do(
    tmp_path: Path, prepare: Callable[[Path], Path]
) -> None:
    path = prepare(tmp_path / "l")
    with pytest.raises(AimGpuError) as caught:
        Ledger.open(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert not list(tmp_path.glob("**/*.corrupt-*"))


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "8m") as disk:
        fill(disk / "l").close()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield disk


def test_a_ledger_on_a_disk_that_became_read_only_is_refused_by_name_with_what_to_do(read_only_disk: Path) -> None:
    path = read_only_disk / "l"
    with pytest.raises(LedgerFailed) as caught:
        Ledger.open(path)
    assert str(path) in caught.value.message
    assert "writ" in str(caught.value.hint)
    assert not isinstance(caught.value, LedgerFull)


def test_a_ledger_that_another_program_holds_is_refused_and_untouched(
    tmp_path: Path, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_MILLISECONDS", 1)
    path = tmp_path / "l"
    path.write_bytes(written)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerFailed) as caught:
            Ledger.open(path)
        assert "holds it" in str(caught.value.hint)
        holder.execute("ROLLBACK")
    assert not list(tmp_path.glob("*.corrupt-*"))
    with contextlib.closing(Ledger.open(path)) as ledger:
        assert len(ledger.instances()) == INSTANCES


def test_a_write_that_another_program_keeps_out_changes_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_MILLISECONDS", 1)
    path = tmp_path / "l"
    with contextlib.closing(Ledger.open(path)) as ledger, contextlib.closing(sqlite3.connect(path)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerFailed, match="locked"):
            ledger.charge(make_instance("a", 1), capacity=CAPACITY)
        assert ledger.instances() == ()
        holder.rollback()
        ledger.charge(make_instance("a", 1), capacity=CAPACITY)
        assert [one.id for one in ledger.instances()] == ["a"]


def test_a_ledger_that_was_closed_takes_nothing_more_and_says_so(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "l")
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerFailed):
        ledger.want(DEPLOYMENT)
    assert ledger.deployments() == ()


# --- read by another process ---


def test_a_ledger_that_is_not_there_or_not_one_reads_as_nothing_and_is_not_made(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00" * 5000)
    for path in (tmp_path / "absent", garbage, tmp_path):
        assert (read_grants(path), read_instances(path), read_deployments(path)) == ((), (), ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["garbage"]


def test_another_process_reads_what_was_committed_and_nothing_of_a_transaction_under_way(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with contextlib.closing(Ledger.open(path)) as ledger:
        ledger.charge(make_instance("a", 1), capacity=CAPACITY)
        with ledger.together():
            ledger.want(DEPLOYMENT)
            ledger.charge(make_instance("b", 1), capacity=CAPACITY)
            assert [one.id for one in read_instances(path)] == ["a"]
            assert read_deployments(path) == ()
        assert read_instances(path) == ledger.instances()
        assert read_deployments(path) == (DEPLOYMENT,)


@pytest.mark.parametrize("table", ["instances", "deployments", "grants"])
def test_fields_of_a_newer_version_do_not_hide_what_runs_from_other_processes(
    tmp_path: Path, written: bytes, table: str
) -> None:
    path = tmp_path / "l"
    path.write_bytes(written)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for number, body in connection.execute(f"SELECT rowid, body FROM {table}").fetchall():  # noqa: S608
            text = json.dumps(json.loads(body) | {"colour": "blue"})
            connection.execute(f"UPDATE {table} SET body = ? WHERE rowid = ?", (text, number))  # noqa: S608
    assert len(read_instances(path)) == len(read_grants(path)) == INSTANCES
    assert all(len(one.grants) == 1 for one in read_instances(path))
    assert read_deployments(path) == (DEPLOYMENT,)


def test_a_copy_of_the_file_alone_is_a_ledger(tmp_path: Path, written: bytes) -> None:
    """What a backup has: one file, without log and reserve."""
    shutil.copyfile(restored(tmp_path, {"l": written}), tmp_path / "backup")
    with contextlib.closing(Ledger.open(tmp_path / "backup")) as ledger:
        assert ledger.set_aside is None
        assert len(ledger.instances()) == INSTANCES
        assert ledger.retry("chat") == Retry(deployment="chat", reason="it died")
        assert ledger.queue() == QueueSettings(per_gpu=3)
        assert ledger.claim("uid-1") == {"pod": "a"}
        assert [one.kind for one in ledger.operations()] == ["partition"]


@pytest.mark.parametrize("name", [b"CREATE TABLE", b"deployments", b"grants_live", b"it died", b"i07", b"fraction"])
def test_a_ledger_with_damaged_text_is_read_around_or_kept_aside_and_never_a_fault_of_ours(
    tmp_path: Path, written: bytes, name: bytes
) -> None:
    path = tmp_path / "l"
    found = written.find(name)
    while found >= 0:  # at each place where it stands: bytes that are no text in any encoding
        path.write_bytes(written[:found] + bytes([0xFF, 0xFE]) + written[found + 2 :])
        assert not has_other_schema(path)
        Ledger.open(path).close()
        read_grants(path)
        found = written.find(name, found + 1)
