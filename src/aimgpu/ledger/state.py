"""The ledger in memory, equal to the file after every commit: reading costs no I/O, no lock and no decoding."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from aimgpu.domain import Deployment, Grant, Instance
from aimgpu.ledger.rows import LedgerRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a deployment that failed or found no room is tried again; kept over restarts of the daemon."""

    deployment: str
    reason: str
    failures: int = 0  # in a row
    last_failure_ms: int = 0  # since the epoch
    retry_at_ms: int | None = None  # None: it runs, or no try is left
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class _Joined:
    """An instance with its grants, and the row that it was made from."""

    row: LedgerRow[Instance]
    instance: Instance


@dataclass(kw_only=True)
class LedgerState:
    """Not changed once it is published; a transaction works on a copy."""

    deployments: dict[str, LedgerRow[Deployment]] = field(default_factory=dict)
    instances: dict[str, LedgerRow[Instance]] = field(default_factory=dict)  # without their grants
    grants: dict[str, LedgerRow[Grant]] = field(default_factory=dict)  # those that are held
    retries: dict[str, LedgerRow[Retry]] = field(default_factory=dict)
    joined: dict[str, "_Joined"] = field(default_factory=dict)  # of an earlier state: what did not change is not made again

    def copy(self) -> "LedgerState":
        """For a transaction; the rows are shared."""
        return LedgerState(
            deployments=dict(self.deployments),
            instances=dict(self.instances),
            grants=dict(self.grants),
            retries=dict(self.retries),
            joined=self.joined,
        )

    @cached_property
    def all_deployments(self) -> tuple[Deployment, ...]:
        """By name."""
        return tuple(self.deployments[name].value for name in sorted(self.deployments))

    @cached_property
    def all_grants(self) -> tuple[Grant, ...]:
        """By id."""
        return tuple(self.grants[name].value for name in sorted(self.grants))

    @cached_property
    def all_retries(self) -> tuple[Retry, ...]:
        """By deployment."""
        return tuple(self.retries[name].value for name in sorted(self.retries))

    @cached_property
    def full_instances(self) -> dict[str, Instance]:
        """Each with the grants that it holds, by id, in the order in which they are shown."""
        held: dict[str, list[Grant]] = {}
        for grant in self.all_grants:
            held.setdefault(grant.instance_id, []).append(grant)
        joined: dict[str, _Joined] = {}
        for name, row in self.instances.items():
            grants = tuple(held.get(name, ()))
            known = self.joined.get(name)
            same = known is not None and known.row is row and known.instance.grants == grants
            joined[name] = known if known is not None and same else _Joined(row, replace(row.value, grants=grants))
        self.joined = joined
        ordered = sorted((one.instance for one in joined.values()), key=lambda one: (one.deployment, one.replica, one.id))
        return {one.id: one for one in ordered}

    @cached_property
    def all_instances(self) -> tuple[Instance, ...]:
        """By deployment, replica and id."""
        return tuple(self.full_instances.values())

    def held_by(self, instance_id: str) -> list[Grant]:
        """What one instance holds."""
        return [row.value for row in self.grants.values() if row.value.instance_id == instance_id]
