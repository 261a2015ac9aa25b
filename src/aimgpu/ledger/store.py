"""The ledger: deployments wanted, instances, grants charged and released, operations under way."""

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
from aimgpu.errors import Conflict, LedgerCorrupt, LedgerFailed, LedgerFull
from aimgpu.ledger.file import QUEUE, move_aside, open_file, translated
from aimgpu.ledger.reserve import Reserve
from aimgpu.ledger.rows import LedgerRow, read_row
from aimgpu.ledger.state import LedgerState, Retry
from aimgpu.ledger.transaction import Transaction, check_room

_KEPT_RELEASED_GRANTS = 1000
_RELEASES_BETWEEN_PRUNES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOperation:
    """Something of several steps that was begun; one still here at start was cut short."""

    id: int
    kind: str
    body: Mapping[str, Any]


class Ledger:
    """Every write is one transaction: it happened whole or not at all. Reads come from memory. Thread-safe."""

    def __init__(
        self,
        opened: tuple[sqlite3.Connection, LedgerState],
        reserve: Reserve,
        *,
        set_aside: Path | None,
        now_ms: Callable[[], int],
    ) -> None:
        self._connection, self._state = opened
        self._reserve = reserve
        self._lock = threading.RLock()
        self._now_ms = now_ms
        self._releases = 0
        self._open: Transaction | None = None  # the transaction of `together`
        self.set_aside = set_aside

    @classmethod
    def open(cls, path: Path, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> Self:
        """Open or make the file. A corrupt one is kept aside (`set_aside` names it) and an empty one begun."""
        set_aside = None
        try:
            opened = open_file(path)
        except LedgerCorrupt:
            set_aside = move_aside(path)
            opened = open_file(path)
        reserve = Reserve(path.with_name(path.name + ".reserve"))
        reserve.fill()
        return cls(opened, reserve, set_aside=set_aside, now_ms=now_ms)

    def close(self) -> None:
        """Nothing can be written afterwards."""
        with self._lock:
            self._connection.close()

    # --- what is wanted ---

    def deployments(self) -> tuple[Deployment, ...]:
        """What should run, by name."""
        return self._state.all_deployments

    def deployment(self, name: str) -> Deployment | None:
        """One of them."""
        row = self._state.deployments.get(name)
        return row.value if row is not None else None

    def want(self, *deployments: Deployment) -> None:
        """Record that these should run; one of the same name is replaced."""
        deployments = tuple(one for one in deployments if self.deployment(one.name) != one)
        if not deployments:
            return
        with self._write(durable=True) as change:
            for deployment in deployments:
                row = change.state.deployments.get(deployment.name, LedgerRow(deployment)).with_value(deployment)
                change.state.deployments[deployment.name] = row
                change.execute(
                    "INSERT INTO deployments (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
                    deployment.name,
                    row.text,
                )

    def amend(self, deployment: Deployment, *, former: str, revision: str) -> None:
        """Record settings that changed while it runs: its instances of revision `former` count as started from the new one.

        Raises Conflict where it is not wanted any more.
        """
        with self._write(durable=True) as change:
            known = change.state.deployments.get(deployment.name)
            if known is None:
                raise Conflict(f"{deployment.name} was released meanwhile")
            row = change.state.deployments[deployment.name] = known.with_value(deployment)
            change.execute("UPDATE deployments SET body = ? WHERE name = ?", row.text, deployment.name)
            for instance in [one.value for one in change.state.instances.values()]:
                if instance.deployment == deployment.name and instance.revision == former:
                    change.put_instance(instance, revision=revision)
                    for grant in change.state.held_by(instance.id):
                        change.put_grant(replace(grant, priority=deployment.ask.priority))

    def unwant(self, *names: str) -> None:
        """Record that these should not run any more."""
        if names:
            self._give_back(lambda: self._unwant(names))

    def _unwant(self, names: tuple[str, ...]) -> None:
        with self._write(durable=True) as change:
            for name in names:
                change.state.deployments.pop(name, None)
                change.execute("DELETE FROM deployments WHERE name = ?", name)

    def queue(self) -> QueueSettings:
        """The bounds of the gateway's queue."""
        rows = self._read("SELECT body FROM settings WHERE name = ?", QUEUE)
        return read_row(QueueSettings, rows[0][0], "settings").value if rows else QueueSettings()

    def keep_queue(self, settings: QueueSettings) -> None:
        """For the next start."""
        self._give_back(lambda: self._keep_queue(settings))

    def _keep_queue(self, settings: QueueSettings) -> None:
        with self._write(durable=True) as change:
            if settings == QueueSettings():
                change.execute("DELETE FROM settings WHERE name = ?", QUEUE)
            else:
                change.execute(
                    "INSERT INTO settings (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
                    QUEUE,
                    LedgerRow(settings).text,
                )

    # --- what is tried again ---

    def retries(self) -> tuple[Retry, ...]:
        """Deployments that failed or found no room."""
        return self._state.all_retries

    def retry(self, name: str) -> Retry | None:
        """Of one deployment."""
        row = self._state.retries.get(name)
        return row.value if row is not None else None

    def keep_retry(self, retry: Retry) -> None:
        """Replaces what was known of its deployment."""
        with self._write() as change:
            _put_retry(change, retry)

    def forget_retries(self, *names: str) -> None:
        """They start counting from zero."""
        known = [name for name in names if name in self._state.retries]
        if known:
            self._give_back(lambda: self._forget_retries(known))

    def _forget_retries(self, names: list[str]) -> None:
        with self._write() as change:
            for name in names:
                change.state.retries.pop(name, None)
                change.execute("DELETE FROM retries WHERE name = ?", name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the write lock, so that what is read inside is still true when it is replaced."""
        with self._lock:
            yield

    # --- what runs ---

    def instances(self) -> tuple[Instance, ...]:
        """Every instance, each with the grants that it holds now."""
        return self._state.all_instances

    def instance(self, instance_id: str) -> Instance | None:
        """One of them."""
        return self._state.full_instances.get(instance_id)

    def update(self, instance: Instance) -> None:
        """Record a known instance's state, process or endpoint; grants change by charge and release, revisions by `amend`."""
        if instance.state is InstanceState.DRAINING:
            self._give_back(lambda: self._update(instance))
        else:
            self._update(instance)

    def note(self, instance: Instance) -> None:
        """As `update`, but in memory only: for progress that has no value after a crash."""
        with self._lock:
            row = self._state.instances.get(instance.id)
            if row is None:
                raise LedgerFailed(f"no instance {instance.id} in the ledger")
            state = self._state.copy()
            state.instances[instance.id] = row.with_value(replace(instance, grants=(), revision=row.value.revision))
            self._state = state

    def _update(self, instance: Instance) -> None:
        with self._write() as change:
            change.put_instance(instance)

    # --- what is charged ---

    def grants(self) -> tuple[Grant, ...]:
        """What is held now."""
        return self._state.all_grants

    def charge(self, *instances: Instance, capacity: Mapping[str, int]) -> None:
        """Record the instances with their grants, all or none; `capacity` has the bytes of each partition.

        An instance that holds grants already is refused: nothing is charged twice.
        """
        if not instances:
            return
        self._reserve.fill()
        with self._write() as change:
            taken = change.taken_bytes()
            for instance in instances:
                change.add_instance(instance)
                if change.state.held_by(instance.id):
                    raise Conflict(f"{instance.id} is charged already")
                for grant in instance.grants:
                    check_room(grant, capacity, taken.get(grant.partition_id, 0))
                    taken[grant.partition_id] = taken.get(grant.partition_id, 0) + grant.memory_bytes
                    change.add_grant(grant, self._now_ms())

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
        with self._write() as change:
            held = {grant.id: grant for grant in change.state.held_by(instance.id)}
            if held.keys() != {grant.id for grant in instance.grants}:
                raise Conflict(f"{instance.id} does not hold what is to be changed")
            for grant in instance.grants:
                change.change_grant(grant, capacity)
            change.put_instance(instance)

    def resize(self, grant_id: str, memory_bytes: int, *, capacity: Mapping[str, int]) -> None:
        """Charge one live grant another size; what does not fit beside the others, or was released, raises Conflict."""
        self._reserve.fill()
        with self._write() as change:
            row = change.state.grants.get(grant_id)
            if row is None:
                raise Conflict(f"{grant_id} was released meanwhile")
            change.change_grant(replace(row.value, memory_bytes=memory_bytes), capacity)

    def lower_level(self, instance_id: str, level: Level, mechanism: str | None = None) -> None:
        """The grants of this instance are enforced at this level at most. Bytes stay as charged."""
        with self._write() as change:
            for grant in change.state.held_by(instance_id):
                if grant.level.rank > level.rank:
                    change.put_grant(replace(grant, level=level, mechanisms=(mechanism,) if mechanism else grant.mechanisms))

    def note_enforcement(self, *grants: Grant) -> None:
        """Record by what, and at which level, these live grants are enforced; nothing else of them changes."""
        with self._write() as change:
            for new in grants:
                row = change.state.grants.get(new.id)
                if row is not None:
                    change.put_grant(replace(row.value, level=new.level, mechanisms=new.mechanisms))

    def release(
        self, instance_id: str, *, keep: Instance | None = None, retry: Callable[[Retry | None], Retry] | None = None
    ) -> tuple[Grant, ...]:
        """Give back what the instance holds, by the records it was charged with.

        The instance leaves the ledger too, unless `keep` says what to show of it (a failed one with its last lines). `retry`
        turns the earlier record of trying it again into the new one, in the same write.
        """
        held = tuple(self._state.held_by(instance_id))
        self._give_back(lambda: self._release(instance_id, keep, retry))
        return held

    def _release(self, instance_id: str, keep: Instance | None, retry: Callable[[Retry | None], Retry] | None = None) -> None:
        with self._write() as change:
            change.release_grants(instance_id, self._now_ms())
            if keep is None:
                change.remove_instance(instance_id)
            else:
                change.put_instance(keep, must_exist=False)
                if retry is not None:
                    known = change.state.retries.get(keep.deployment)
                    _put_retry(change, retry(known.value if known is not None else None))
            self._releases += 1
            if self._releases % _RELEASES_BETWEEN_PRUNES == 0:
                change.execute(
                    "DELETE FROM grants WHERE released_at_ms IS NOT NULL AND id NOT IN "
                    "(SELECT id FROM grants WHERE released_at_ms IS NOT NULL ORDER BY released_at_ms DESC, id LIMIT ?)",
                    _KEPT_RELEASED_GRANTS,
                )

    def forget(self, instance_id: str) -> None:
        """Drop an instance that holds nothing (a failed one that is no longer shown)."""
        if self.release(instance_id):
            raise LedgerFailed(f"{instance_id} still held grants")

    # --- what was begun ---

    def begin(self, kind: str, body: Mapping[str, Any], *, frees: bool = False) -> int:
        """The intent before the act; returns what to finish. What only `frees` is possible on a full disk too."""
        if not frees:
            return self._begin(kind, body)
        try:
            return self._begin(kind, body)
        except LedgerFull:
            if not self._reserve.spend():
                raise
            return self._begin(kind, body)

    def _begin(self, kind: str, body: Mapping[str, Any]) -> int:
        with self._write() as change:
            change.execute("INSERT INTO operations (kind, body) VALUES (?, ?)", kind, json.dumps(dict(body)))
            return int(self._connection.execute("SELECT last_insert_rowid()").fetchone()[0])

    def finish(self, operation_id: int) -> None:
        """It was carried out, or undone."""
        self._give_back(lambda: self._finish(operation_id))

    def _finish(self, operation_id: int) -> None:
        with self._write() as change:
            change.execute("DELETE FROM operations WHERE id = ?", operation_id)

    def operations(self) -> tuple[OpenOperation, ...]:
        """Those under way, or cut short."""
        rows = self._read("SELECT id, kind, body FROM operations ORDER BY id")
        return tuple(OpenOperation(id=number, kind=kind, body=json.loads(body)) for number, kind, body in rows)

    # --- what a cluster asked of this node ---

    def claims(self) -> dict[str, dict[str, Any]]:
        """What was recorded for each claim of the cluster, by its uid."""
        rows = self._read("SELECT uid, body FROM claims ORDER BY uid")
        return {uid: json.loads(body) for uid, body in rows}

    def claim(self, uid: str) -> dict[str, Any] | None:
        """One of them."""
        rows = self._read("SELECT body FROM claims WHERE uid = ?", uid)
        found: dict[str, Any] | None = json.loads(rows[0][0]) if rows else None
        return found

    def keep_claim(self, uid: str, body: Mapping[str, Any]) -> None:
        """Replaces what was recorded for it."""
        with self._write(durable=True) as change:
            change.execute(
                "INSERT INTO claims (uid, body) VALUES (?, ?) ON CONFLICT (uid) DO UPDATE SET body = excluded.body",
                uid,
                json.dumps(dict(body)),
            )

    def drop_claim(self, uid: str) -> None:
        """Safe to call twice."""
        self._give_back(lambda: self._drop_claim(uid))

    def _drop_claim(self, uid: str) -> None:
        with self._write(durable=True) as change:
            change.execute("DELETE FROM claims WHERE uid = ?", uid)

    # --- the one way to the file ---

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is written within is one transaction; reads see it when it ends. An error undoes all of it."""
        with self._lock, self._write() as change:
            self._open = change
            try:
                yield
            finally:
                self._open = None

    def _give_back(self, write: Callable[[], None]) -> None:
        """What frees something must be possible on a full disk too: the reserve is kept for it."""
        try:
            write()
        except LedgerFull:
            if not self._reserve.spend():
                raise
            write()

    def _read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, translated():
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _write(self, *, durable: bool = False) -> Iterator[Transaction]:
        """The memory follows the file once it is committed.

        Every commit survives the death of this process. `durable`: a power failure too, which costs a sync of the disk; what
        runs does not survive that, so it is what is wanted that has to.
        """
        with self._lock, translated():
            if self._open is not None:
                yield self._open
                return
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            change = Transaction(self._connection, self._state.copy())
            try:
                yield change
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite itself rolls back on a full disk; a second ROLLBACK would hide the first error.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self._state = change.state


def _put_retry(change: Transaction, retry: Retry) -> None:
    row = change.state.retries[retry.deployment] = change.state.retries.get(retry.deployment, LedgerRow(retry)).with_value(
        retry
    )
    change.execute(
        "INSERT INTO retries (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
        retry.deployment,
        row.text,
    )
