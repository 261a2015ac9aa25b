"""One write to the ledger: on the file and on a copy of the memory, which replaces the memory once the file has it."""

import sqlite3
from collections.abc import Mapping
from dataclasses import replace

from aimgpu.domain import Grant, Instance
from aimgpu.errors import Conflict, LedgerFailed
from aimgpu.ledger.rows import LedgerRow
from aimgpu.ledger.state import LedgerState


class Transaction:
    """One transaction, on the file and on a copy of the memory."""

    def __init__(self, connection: sqlite3.Connection, state: LedgerState) -> None:
        self._connection = connection
        self.state = state

    def execute(self, sql: str, *values: object) -> int:
        return self._connection.execute(sql, values).rowcount

    def taken_bytes(self) -> dict[str, int]:
        taken: dict[str, int] = {}
        for row in self.state.grants.values():
            taken[row.value.partition_id] = taken.get(row.value.partition_id, 0) + row.value.memory_bytes
        return taken

    def add_instance(self, instance: Instance) -> None:
        row = self._put(instance, LedgerRow(instance))
        self.execute(
            "INSERT INTO instances (id, deployment, replica, state, body) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET state = excluded.state, body = excluded.body",
            instance.id,
            instance.deployment,
            instance.replica,
            instance.state,
            row.text,
        )

    def put_instance(self, instance: Instance, *, must_exist: bool = True, revision: str | None = None) -> None:
        """Its revision stays as it is in the ledger, unless given here: the caller's copy may be older than an amendment."""
        known = self.state.instances.get(instance.id)
        if known is None:
            if must_exist:
                raise LedgerFailed(f"no instance {instance.id} in the ledger")
            return
        row = self._put(replace(instance, revision=revision or known.value.revision), known)
        self.execute("UPDATE instances SET state = ?, body = ? WHERE id = ?", instance.state, row.text, instance.id)

    def _put(self, instance: Instance, default: LedgerRow[Instance]) -> LedgerRow[Instance]:
        row = self.state.instances.get(instance.id, default).with_value(replace(instance, grants=()))
        self.state.instances[instance.id] = row
        return row

    def remove_instance(self, instance_id: str) -> None:
        self.state.instances.pop(instance_id, None)
        self.execute("DELETE FROM instances WHERE id = ?", instance_id)

    def add_grant(self, grant: Grant, now_ms: int) -> None:
        row = self.state.grants[grant.id] = LedgerRow(grant)
        self.execute(
            "INSERT INTO grants (id, instance_id, partition_id, memory_bytes, body, charged_at_ms) VALUES (?, ?, ?, ?, ?, ?)",
            grant.id,
            grant.instance_id,
            grant.partition_id,
            grant.memory_bytes,
            row.text,
            now_ms,
        )

    def change_grant(self, grant: Grant, capacity: Mapping[str, int]) -> None:
        """Larger only where it fits beside all others; its priority changes by `amend` alone."""
        held = self.state.grants[grant.id].value
        if grant.memory_bytes > held.memory_bytes:
            check_room(grant, capacity, self.taken_bytes().get(grant.partition_id, 0) - held.memory_bytes)
        self.put_grant(replace(grant, priority=held.priority))

    def put_grant(self, grant: Grant) -> None:
        row = self.state.grants[grant.id] = self.state.grants[grant.id].with_value(grant)
        self.execute("UPDATE grants SET memory_bytes = ?, body = ? WHERE id = ?", grant.memory_bytes, row.text, grant.id)

    def release_grants(self, instance_id: str, now_ms: int) -> None:
        for grant in self.state.held_by(instance_id):
            del self.state.grants[grant.id]
        self.execute(
            "UPDATE grants SET released_at_ms = ? WHERE instance_id = ? AND released_at_ms IS NULL", now_ms, instance_id
        )


def check_room(grant: Grant, capacity: Mapping[str, int], taken: int) -> None:
    """Check that this grant fits beside all others; `taken`: their bytes."""
    size = capacity.get(grant.partition_id)
    if size is None:
        raise Conflict(f"there is no partition {grant.partition_id}", hint="The layout changed meanwhile; ask again.")
    if taken + grant.memory_bytes > size:
        raise Conflict(
            f"{grant.partition_id} has {size - taken} bytes left, {grant.memory_bytes} were to be charged",
            hint="Something else was placed meanwhile; ask again.",
        )
