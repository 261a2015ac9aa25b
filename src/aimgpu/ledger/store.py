"""The books: deployments wanted, instances, grants charged and released, operations under way."""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from aimgpu.domain import Deployment, Grant, Instance, InstanceState, Level, QueueSettings
from aimgpu.domain.codec import decode, encode
from aimgpu.errors import Conflict, LedgerCorrupt, LedgerFailed, LedgerFull
from aimgpu.ledger.reserve import Reserve
from aimgpu.ledger.schema import MIGRATIONS, VERSION

_KEPT_RELEASED_GRANTS = 1000
_QUEUE = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Something of several steps that was begun; one still here at start was cut short."""

    id: int
    kind: str
    body: Mapping[str, Any]


class Ledger:
    """Every write is one transaction: it happened whole or not at all. Safe to use from several threads."""

    def __init__(
        self, connection: sqlite3.Connection, reserve: Reserve, *, set_aside: Path | None, now_ms: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._reserve = reserve
        self._lock = threading.RLock()
        self._now_ms = now_ms
        self.set_aside = set_aside

    @classmethod
    def open(cls, path: Path, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> Self:
        """Open or make the file. A corrupt one is kept aside (`set_aside` names it) and an empty one begun."""
        set_aside = None
        try:
            connection = _connect(path)
        except LedgerCorrupt:
            set_aside = _move_aside(path)
            connection = _connect(path)
        reserve = Reserve(path.with_name(path.name + ".reserve"))
        reserve.fill()
        return cls(connection, reserve, set_aside=set_aside, now_ms=now_ms)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # --- what is wanted ---

    def deployments(self) -> tuple[Deployment, ...]:
        rows = self._read("SELECT body FROM deployments ORDER BY name")
        return tuple(decode(Deployment, json.loads(body), "deployment") for (body,) in rows)

    def want(self, *deployments: Deployment) -> None:
        with self._write() as write:
            for deployment in deployments:
                write("INSERT OR REPLACE INTO deployments VALUES (?, ?)", deployment.name, _text(deployment))

    def unwant(self, *names: str) -> None:
        self._give_back(lambda: self._unwant(names))

    def _unwant(self, names: tuple[str, ...]) -> None:
        with self._write() as write:
            for name in names:
                write("DELETE FROM deployments WHERE name = ?", name)

    def queue(self) -> QueueSettings:
        rows = self._read("SELECT body FROM settings WHERE name = ?", _QUEUE)
        found: QueueSettings = decode(QueueSettings, json.loads(rows[0][0]), "settings") if rows else QueueSettings()
        return found

    def keep_queue(self, settings: QueueSettings) -> None:
        self._give_back(lambda: self._keep_queue(settings))

    def _keep_queue(self, settings: QueueSettings) -> None:
        with self._write() as write:
            if settings == QueueSettings():
                write("DELETE FROM settings WHERE name = ?", _QUEUE)
            else:
                write("INSERT OR REPLACE INTO settings VALUES (?, ?)", _QUEUE, json.dumps(encode(settings)))

    # --- what runs ---

    def instances(self) -> tuple[Instance, ...]:
        """Every instance, each with the grants that it holds now."""
        held: dict[str, list[Grant]] = {}
        with self._lock:
            for grant in self.grants():
                held.setdefault(grant.instance_id, []).append(grant)
            rows = self._read("SELECT body FROM instances ORDER BY deployment, replica, id")
        found = (decode(Instance, json.loads(body), "instance") for (body,) in rows)
        return tuple(replace(instance, grants=tuple(held.get(instance.id, ()))) for instance in found)

    def instance(self, instance_id: str) -> Instance | None:
        return next((found for found in self.instances() if found.id == instance_id), None)

    def update(self, instance: Instance) -> None:
        """Record a known instance's state, process or endpoint; its grants change only by charge and release."""
        if instance.state is InstanceState.DRAINING:
            self._give_back(lambda: self._update(instance))
        else:
            self._update(instance)

    def _update(self, instance: Instance) -> None:
        with self._write() as write:
            changed = write(
                "UPDATE instances SET state = ?, body = ? WHERE id = ?", instance.state, _instance_text(instance), instance.id
            )
            if changed != 1:
                raise LedgerFailed(f"no instance {instance.id} in the ledger")

    # --- what is charged ---

    def grants(self) -> tuple[Grant, ...]:
        rows = self._read("SELECT body FROM grants WHERE released_at_ms IS NULL ORDER BY id")
        return tuple(decode(Grant, json.loads(body), "grant") for (body,) in rows)

    def charge(self, *instances: Instance, capacity: Mapping[str, int]) -> None:
        """Record the instances with their grants, all or none; `capacity` has the bytes of each Partition.

        An instance that holds grants already is refused: nothing is charged twice.
        """
        self._reserve.fill()
        with self._write() as write:
            for instance in instances:
                write(
                    "INSERT OR REPLACE INTO instances VALUES (?, ?, ?, ?, ?)",
                    instance.id,
                    instance.deployment,
                    instance.replica,
                    instance.state,
                    _instance_text(instance),
                )
                if self._scalar("SELECT count(*) FROM grants WHERE instance_id = ? AND released_at_ms IS NULL", instance.id):
                    raise Conflict(f"{instance.id} is charged already")
                for grant in instance.grants:
                    self._charge_grant(write, grant, capacity)

    def _charge_grant(self, write: Callable[..., int], grant: Grant, capacity: Mapping[str, int]) -> None:
        self._check_room(grant, capacity)
        text, now = json.dumps(encode(grant)), self._now_ms()
        row = (grant.id, grant.instance_id, grant.partition_id, grant.memory_bytes, text, now)
        write("INSERT INTO grants VALUES (?, ?, ?, ?, ?, ?, NULL)", *row)

    def _check_room(self, grant: Grant, capacity: Mapping[str, int]) -> None:
        """That this grant fits beside all others, whatever it holds itself now."""
        size = capacity.get(grant.partition_id)
        if size is None:
            raise Conflict(f"there is no partition {grant.partition_id}", hint="The layout changed meanwhile; ask again.")
        where = "FROM grants WHERE partition_id = ? AND id != ? AND released_at_ms IS NULL"
        taken = self._scalar(f"SELECT coalesce(sum(memory_bytes), 0) {where}", grant.partition_id, grant.id)
        if taken + grant.memory_bytes > size:
            raise Conflict(
                f"{grant.partition_id} has {size - taken} bytes left, {grant.memory_bytes} were to be charged",
                hint="Something else was placed meanwhile; ask again.",
            )

    def rebook(self, instance: Instance, *, capacity: Mapping[str, int] | None = None) -> None:
        """Record the instance with other sizes of the grants that it holds, all or nothing.

        More than it holds now takes `capacity`, and is refused where it does not fit; less is possible on a full disk too.
        """
        if capacity is None:
            self._give_back(lambda: self._rebook(instance, {}))
        else:
            self._reserve.fill()
            self._rebook(instance, capacity)

    def _rebook(self, instance: Instance, capacity: Mapping[str, int]) -> None:
        with self._write() as write:
            held = {grant.id: grant for grant in self.grants() if grant.instance_id == instance.id}
            if held.keys() != {grant.id for grant in instance.grants}:
                raise Conflict(f"{instance.id} does not hold what is to be changed")
            for grant in instance.grants:
                if grant.memory_bytes > held[grant.id].memory_bytes:
                    self._check_room(grant, capacity)
                _rewrite(write, grant)
            row = (instance.state, _instance_text(instance), instance.id)
            if write("UPDATE instances SET state = ?, body = ? WHERE id = ?", *row) != 1:
                raise LedgerFailed(f"no instance {instance.id} in the ledger")

    def resize(self, grant_id: str, memory_bytes: int, *, capacity: Mapping[str, int]) -> None:
        """Charge one live grant another size; what does not fit beside the others, or was released, raises Conflict."""
        self._reserve.fill()
        with self._write() as write:
            grant = next((grant for grant in self.grants() if grant.id == grant_id), None)
            if grant is None:
                raise Conflict(f"{grant_id} was released meanwhile")
            resized = replace(grant, memory_bytes=memory_bytes)
            if memory_bytes > grant.memory_bytes:
                self._check_room(resized, capacity)
            _rewrite(write, resized)

    def lower_level(self, instance_id: str, level: Level, mechanism: str | None = None) -> None:
        """Tell what is true: the grants of this instance are enforced at this Level at most. Bytes stay as charged."""
        with self._write() as write:
            for grant in self.grants():
                if grant.instance_id == instance_id and grant.level.rank > level.rank:
                    _rewrite(write, replace(grant, level=level, mechanism=mechanism or grant.mechanism))

    def note_enforcement(self, *grants: Grant) -> None:
        """Record by what, and at which Level, these live grants are made true; nothing else of them changes."""
        noted = {grant.id: grant for grant in grants}
        with self._write() as write:
            for grant in self.grants():
                if (new := noted.get(grant.id)) is not None:
                    _rewrite(write, replace(grant, level=new.level, mechanism=new.mechanism))

    def release(self, instance_id: str, *, keep: Instance | None = None) -> tuple[Grant, ...]:
        """Give back what the instance holds, by the records it was charged with.

        The instance leaves the books too, unless `keep` is what to show of it (a failed one with its last lines).
        """
        held = tuple(grant for grant in self.grants() if grant.instance_id == instance_id)
        self._give_back(lambda: self._release(instance_id, keep))
        return held

    def _release(self, instance_id: str, keep: Instance | None) -> None:
        with self._write() as write:
            write(
                "UPDATE grants SET released_at_ms = ? WHERE instance_id = ? AND released_at_ms IS NULL",
                self._now_ms(),
                instance_id,
            )
            if keep is None:
                write("DELETE FROM instances WHERE id = ?", instance_id)
            else:
                text = _instance_text(keep)
                write("UPDATE instances SET state = ?, body = ? WHERE id = ?", keep.state, text, instance_id)
            write(
                "DELETE FROM grants WHERE released_at_ms IS NOT NULL AND id NOT IN "
                "(SELECT id FROM grants WHERE released_at_ms IS NOT NULL ORDER BY released_at_ms DESC, id LIMIT ?)",
                _KEPT_RELEASED_GRANTS,
            )

    def forget(self, instance_id: str) -> None:
        """Drop an instance that holds nothing (a failed one that is no longer shown)."""
        if self.release(instance_id):
            raise LedgerFailed(f"{instance_id} still held grants")

    # --- what was begun ---

    def begin(self, kind: str, body: Mapping[str, Any]) -> int:
        with self._write() as write:
            write("INSERT INTO operations (kind, body) VALUES (?, ?)", kind, json.dumps(dict(body)))
            return self._scalar("SELECT last_insert_rowid()")

    def finish(self, operation_id: int) -> None:
        self._give_back(lambda: self._finish(operation_id))

    def _finish(self, operation_id: int) -> None:
        with self._write() as write:
            write("DELETE FROM operations WHERE id = ?", operation_id)

    def operations(self) -> tuple[Operation, ...]:
        rows = self._read("SELECT id, kind, body FROM operations ORDER BY id")
        return tuple(Operation(id=number, kind=kind, body=json.loads(body)) for number, kind, body in rows)

    # --- what a cluster asked of this node ---

    def claims(self) -> dict[str, dict[str, Any]]:
        """What was recorded for each claim of the cluster, by its uid."""
        rows = self._read("SELECT uid, body FROM claims ORDER BY uid")
        return {uid: json.loads(body) for uid, body in rows}

    def claim(self, uid: str) -> dict[str, Any] | None:
        rows = self._read("SELECT body FROM claims WHERE uid = ?", uid)
        found: dict[str, Any] | None = json.loads(rows[0][0]) if rows else None
        return found

    def keep_claim(self, uid: str, body: Mapping[str, Any]) -> None:
        with self._write() as write:
            write("INSERT OR REPLACE INTO claims VALUES (?, ?)", uid, json.dumps(dict(body)))

    def drop_claim(self, uid: str) -> None:
        self._give_back(lambda: self._drop_claim(uid))

    def _drop_claim(self, uid: str) -> None:
        with self._write() as write:
            write("DELETE FROM claims WHERE uid = ?", uid)

    # --- the one door to the file ---

    def _give_back(self, write: Callable[[], None]) -> None:
        """What frees something must be possible on a full disk too: the reserve is kept for it."""
        try:
            write()
        except LedgerFull:
            if not self._reserve.spend():
                raise
            write()

    def _read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, _translated():
            return self._connection.execute(sql, values).fetchall()

    def _scalar(self, sql: str, *values: object) -> int:
        return int(self._read(sql, *values)[0][0])

    @contextlib.contextmanager
    def _write(self) -> Iterator[Callable[..., int]]:
        with self._lock, _translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield lambda sql, *values: self._connection.execute(sql, values).rowcount
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite itself rolls back on a full disk; a second ROLLBACK would hide the first error.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def read_grants(path: Path) -> tuple[Grant, ...]:
    """What is charged in the books of a daemon that is not there; none where they cannot be read. Changes nothing."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT body FROM grants WHERE released_at_ms IS NULL ORDER BY id").fetchall()
        return tuple(decode(Grant, json.loads(body), "grant") for (body,) in rows)
    except (sqlite3.Error, ValueError):
        return ()


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _translated():
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        with _translated():
            path.chmod(0o600)
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            _check(connection, path)
            _migrate(connection, path)
            _check_rows(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise LedgerCorrupt(f"{path} is corrupt: {verdict}")


def _check_rows(connection: sqlite3.Connection, path: Path) -> None:
    """A page may be whole and its text still not ours: read every row once, while the file can still be set aside."""
    try:
        for table, kind in (("deployments", Deployment), ("instances", Instance), ("grants", Grant)):
            for (body,) in connection.execute(f"SELECT body FROM {table}"):  # noqa: S608 - fixed names
                decode(kind, json.loads(body), table)
        for (body,) in connection.execute("SELECT body FROM settings WHERE name = ?", (_QUEUE,)):
            decode(QueueSettings, json.loads(body), "settings")
        for (body,) in connection.execute("SELECT body FROM operations UNION ALL SELECT body FROM claims"):
            json.loads(body)
    except ValueError as error:
        raise LedgerCorrupt(f"{path} holds a row that cannot be read: {error}") from error


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        raise LedgerFailed(
            f"{path} was written by a newer version (schema {found}, this one knows {VERSION})",
            hint="Upgrade aimgpu, or set AIMGPU_HOME to another folder.",
        )
    for number in range(found, VERSION):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def _move_aside(path: Path) -> Path:
    """Keep the corrupt file and its WAL under a free name; evidence is never deleted."""
    number = next(n for n in range(1, 10_000) if not path.with_name(f"{path.name}.corrupt-{n}").exists())
    target = path.with_name(f"{path.name}.corrupt-{number}")
    for suffix in ("-wal", "-shm"):
        extra = path.with_name(path.name + suffix)
        if extra.exists():
            extra.rename(target.with_name(target.name + suffix))
    path.rename(target)
    return target


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "is full" in text:
            raise LedgerFull(f"the ledger cannot be written: {text}", hint="Free disk space; nothing was changed.") from error
        if "malformed" in text or "not a database" in text or "corrupt" in text:
            raise LedgerCorrupt(f"the ledger is corrupt: {text}", hint="Restart: it is kept aside and rebuilt.") from error
        raise LedgerFailed(f"the ledger failed: {text}") from error


def _rewrite(write: Callable[..., int], grant: Grant) -> None:
    text = json.dumps(encode(grant))
    write("UPDATE grants SET memory_bytes = ?, body = ? WHERE id = ?", grant.memory_bytes, text, grant.id)


def _text(deployment: Deployment) -> str:
    return json.dumps(encode(deployment))


def _instance_text(instance: Instance) -> str:
    return json.dumps(encode(replace(instance, grants=())))
