"""Every write fails at every statement: nothing of it is there afterwards, in memory or on disk, and the ledger goes on."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.ledger.test_ledger import CAPACITY, DEPLOYMENT, make_instance

from aimgpu.domain import InstanceState, Level, QueueSettings
from aimgpu.errors import AimGpuError, Conflict, LedgerFailed
from aimgpu.ledger import Ledger, OpenOperation, Retry

OTHER = replace(DEPLOYMENT, name="code")


class PowerCut(BaseException):
    """Nothing that code on the way could handle."""


class FailingConnection:
    """A connection whose statements fail from a given one on, before SQLite gets to see it; ROLLBACK still works."""

    def __init__(self, connection: sqlite3.Connection, at: int, error: BaseException) -> None:
        self._connection, self._left, self._error = connection, at, error
        self.failed = False

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql != "ROLLBACK":
            if self._left == 0:
                self.failed = True
                raise self._error
            self._left -= 1
        return self._connection.execute(sql, *values)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction


@dataclass(frozen=True, kw_only=True)
class Contents:
    deployments: object
    instances: object
    grants: object
    retries: object
    operations: tuple[OpenOperation, ...]
    claims: object
    queue: QueueSettings


def contents(ledger: Ledger) -> Contents:
    return Contents(
        deployments=ledger.deployments(),
        instances=ledger.instances(),
        grants=ledger.grants(),
        retries=ledger.retries(),
        operations=ledger.operations(),
        claims=ledger.claims(),
        queue=ledger.queue(),
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("prepared") / "l"
    with contextlib.closing(Ledger.open(path)) as ledger:
        ledger.want(DEPLOYMENT)
        started = replace(make_instance("chat", 10), revision="r1")
        ledger.charge(started, make_instance("b", 20), capacity=CAPACITY)
        ledger.keep_retry(Retry(deployment="chat", reason="it died"))
        ledger.keep_claim("uid", {"a": 1})
        ledger.keep_queue(QueueSettings(per_gpu=2))
        ledger.begin("partition", {})
    return path.read_bytes()


def rebook(ledger: Ledger) -> None:
    held = ledger.instance("chat")
    assert held is not None
    smaller = replace(held, grants=tuple(replace(grant, memory_bytes=5) for grant in held.grants))
    ledger.rebook(smaller)


def charge_together(ledger: Ledger) -> None:
    with ledger.together():
        ledger.begin("apply", {"n": 1})
        ledger.charge(make_instance("c", 1), capacity=CAPACITY)
        ledger.release("b")


WRITES: dict[str, Callable[[Ledger], object]] = {
    "want": lambda ledger: ledger.want(OTHER, replace(DEPLOYMENT, concurrency=9)),
    "unwant": lambda ledger: ledger.unwant("chat", "nothing"),
    "amend": lambda ledger: ledger.amend(replace(DEPLOYMENT, concurrency=3), former="r1", revision="r2"),
    "keep_queue": lambda ledger: ledger.keep_queue(QueueSettings(per_gpu=7)),
    "drop_queue": lambda ledger: ledger.keep_queue(QueueSettings()),
    "keep_retry": lambda ledger: ledger.keep_retry(Retry(deployment="chat", reason="again", failures=2)),
    "forget_retries": lambda ledger: ledger.forget_retries("chat"),
    "update": lambda ledger: ledger.update(replace(make_instance("chat", 10), state=InstanceState.LOADING)),
    "drain": lambda ledger: ledger.update(replace(make_instance("chat", 10), state=InstanceState.DRAINING)),
    "charge": lambda ledger: ledger.charge(make_instance("c", 1), make_instance("d", 2, "gpu/spx-1"), capacity=CAPACITY),
    "rebook": rebook,
    "resize": lambda ledger: ledger.resize("chat/0", 30, capacity=CAPACITY),
    "lower_level": lambda ledger: ledger.note_enforcement(
        replace(make_instance("chat", 10).grants[0], level=Level.RUNTIME, mechanisms=("interposer",))
    ),
    "release": lambda ledger: ledger.release("chat"),
    "release_kept": lambda ledger: ledger.release(
        "chat", keep=replace(make_instance("chat", 10), state=InstanceState.FAILED, last_lines=("boom",))
    ),
    "begin": lambda ledger: ledger.begin("apply", {"n": 2}),
    "begin_freeing": lambda ledger: ledger.begin("release", {"n": 2}, frees=True),
    "finish": lambda ledger: ledger.finish(1),
    "keep_claim": lambda ledger: ledger.keep_claim("uid", {"a": 2}),
    "drop_claim": lambda ledger: ledger.drop_claim("uid"),
    "together": charge_together,
}


@pytest.fixture
def path(tmp_path: Path, prepared: bytes) -> Path:
    (tmp_path / "l").write_bytes(prepared)
    return tmp_path / "l"


def fail_in_turn(
    ledger: Ledger, write: Callable[[Ledger], object], make: Callable[[], BaseException]
) -> Iterator[BaseException | None]:
    """The write with its first statement failing, then its second, and so on; None where none was left to fail."""
    connection = ledger._connection
    for at in range(100):
        failing = FailingConnection(connection, at, make())
        ledger._connection = failing  # type: ignore[assignment]
        caught: BaseException | None = None
        try:
            write(ledger)
        except (AimGpuError, PowerCut) as error:
            caught = error
        finally:
            ledger._connection = connection
        yield caught
        if not failing.failed:
            return


@pytest.mark.parametrize("name", WRITES)
def test_a_statement_that_fails_undoes_the_write_in_memory_and_on_disk(path: Path, name: str) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        before = contents(ledger)
        tries = 0
        for caught in fail_in_turn(ledger, WRITES[name], lambda: sqlite3.OperationalError("disk I/O error")):
            tries += 1
            if caught is None:
                break
            assert isinstance(caught, LedgerFailed)
            assert contents(ledger) == before, f"statement {tries}"
        assert tries > 3  # begin, at least one statement, commit
        after = contents(ledger)
        assert after != before
    with contextlib.closing(Ledger.open(path)) as again:
        assert contents(again) == after


@pytest.mark.parametrize("name", WRITES)
def test_a_process_that_dies_within_a_write_leaves_the_file_as_it_was(path: Path, name: str, tmp_path: Path) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        before = contents(ledger)
        for number, caught in enumerate(fail_in_turn(ledger, WRITES[name], PowerCut)):
            copy = tmp_path / f"copy-{number}"
            for suffix in ("", "-wal"):
                copy.with_name(copy.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
            if caught is None:
                break
            assert isinstance(caught, PowerCut)
        ended = number
        after = contents(ledger)
    for number in {0, ended // 2, ended - 1, ended}:
        with contextlib.closing(Ledger.open(tmp_path / f"copy-{number}")) as again:
            assert again.set_aside is None
            assert contents(again) == (after if number == ended else before)


def test_every_method_that_writes_is_tried_here() -> None:
    """A new one is added to the table above, or to those that are put together from others."""
    from_others = {"forget", "keep_retry", "note", "together", "rebook", "note_enforcement", "lower_level"}
    reads = {"deployments", "deployment", "queue", "retries", "retry", "instances", "instance", "grants", "operations"}
    ways = {"open", "close", "claims", "claim", "held"}
    public = {name for name, value in vars(Ledger).items() if callable(value) or isinstance(value, classmethod)}
    assert {name for name in public if not name.startswith("_")} - from_others - reads - ways <= set(WRITES)


# --- what is refused before it is written ---


def test_a_refused_charge_among_others_in_one_transaction_undoes_all_of_it(path: Path) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        before = contents(ledger)

        def too_much() -> None:
            with ledger.together():
                ledger.charge(make_instance("c", 1), capacity=CAPACITY)
                ledger.charge(make_instance("d", 1000), capacity=CAPACITY)

        with pytest.raises(Conflict):
            too_much()
        assert contents(ledger) == before
        ledger.charge(make_instance("c", 1), capacity=CAPACITY)


@pytest.mark.parametrize(("memory_bytes", "fits"), [(1, True), (10, True), (80, True), (81, False), (10**12, False)])
def test_a_grant_grows_into_what_is_free_beside_the_others_and_no_further(path: Path, memory_bytes: int, *, fits: bool) -> None:
    """100 bytes, of which another instance has 20."""
    with contextlib.closing(Ledger.open(path)) as ledger:
        if fits:
            ledger.resize("chat/0", memory_bytes, capacity=CAPACITY)
        else:
            with pytest.raises(Conflict, match="80 bytes left") as caught:
                ledger.resize("chat/0", memory_bytes, capacity=CAPACITY)
            assert caught.value.hint
        held = {grant.id: grant.memory_bytes for grant in ledger.grants()}
        assert held == {"chat/0": memory_bytes if fits else 10, "b/0": 20}


def test_what_is_not_held_any_more_is_neither_resized_nor_rebooked(path: Path) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        held = ledger.instance("chat")
        assert held is not None
        ledger.release("chat")
        with pytest.raises(Conflict, match="released meanwhile"):
            ledger.resize("chat/0", 1, capacity=CAPACITY)
        with pytest.raises(Conflict, match="does not hold"):
            ledger.rebook(held)
        with pytest.raises(LedgerFailed, match="no instance chat"):
            ledger.note(held)
        ledger.note_enforcement(*held.grants)  # came too late, and is no error
        assert [grant.id for grant in ledger.grants()] == ["b/0"]


def test_a_rebooking_that_grows_needs_room_and_one_that_shrinks_does_not(path: Path) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        held = ledger.instance("chat")
        assert held is not None
        larger = replace(held, grants=tuple(replace(grant, memory_bytes=81) for grant in held.grants))
        for capacity in (None, CAPACITY):
            with pytest.raises(Conflict):
                ledger.rebook(larger, capacity=capacity)
        assert ledger.instance("chat") == held
        rebook(ledger)
        assert [grant.memory_bytes for grant in ledger.grants()] == [20, 5]


def test_an_instance_that_still_holds_something_is_not_forgotten_silently(path: Path) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        with pytest.raises(LedgerFailed, match="still held grants"):
            ledger.forget("chat")
        ledger.charge(make_instance("c", 1), capacity=CAPACITY)
        ledger.release("c", keep=make_instance("c", 1))
        ledger.forget("c")
        assert ledger.instance("c") is None


def test_progress_that_is_only_noted_is_seen_now_and_not_after_a_restart(path: Path) -> None:
    with contextlib.closing(Ledger.open(path)) as ledger:
        held = ledger.instance("chat")
        assert held is not None
        ledger.note(replace(held, state=InstanceState.LOADING))
        noted = ledger.instance("chat")
        assert noted is not None
        assert (noted.state, noted.grants) == (InstanceState.LOADING, held.grants)
    with contextlib.closing(Ledger.open(path)) as again:
        assert again.instance("chat") == held


def test_old_releases_are_dropped_and_what_is_held_never_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.ledger.store._KEPT_RELEASED_GRANTS", 5)
    monkeypatch.setattr("aimgpu.ledger.store._RELEASES_BETWEEN_PRUNES", 10)
    clock = iter(range(10_000))
    with contextlib.closing(Ledger.open(tmp_path / "l", now_ms=lambda: next(clock))) as ledger:
        ledger.charge(make_instance("stays", 1), capacity=CAPACITY)
        for number in range(30):
            ledger.charge(make_instance(f"i{number:02d}", 1), capacity=CAPACITY)
            ledger.release(f"i{number:02d}")
    with contextlib.closing(sqlite3.connect(tmp_path / "l")) as connection:
        rows = connection.execute("SELECT id, released_at_ms IS NULL FROM grants ORDER BY id").fetchall()
    assert rows == [*((f"i{number}/0", 0) for number in range(25, 30)), ("stays/0", 1)]
