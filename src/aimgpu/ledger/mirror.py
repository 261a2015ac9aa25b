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


@dataclass(kw_only=True)
class Mirror:
    """Not changed once it is published; a transaction works on a copy."""

    deployments: dict[str, LedgerRow[Deployment]] = field(default_factory=dict)
    instances: dict[str, LedgerRow[Instance]] = field(default_factory=dict)  # without their grants
    grants: dict[str, LedgerRow[Grant]] = field(default_factory=dict)  # those that are held
    retries: dict[str, LedgerRow[Retry]] = field(default_factory=dict)

    def copy(self) -> "Mirror":
        """For a transaction; the rows are shared."""
        return Mirror(
            deployments=dict(self.deployments),
            instances=dict(self.instances),
            grants=dict(self.grants),
            retries=dict(self.retries),
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
        ordered = sorted((row.value for row in self.instances.values()), key=lambda one: (one.deployment, one.replica, one.id))
        return {one.id: replace(one, grants=tuple(held.get(one.id, ()))) for one in ordered}

    @cached_property
    def all_instances(self) -> tuple[Instance, ...]:
        """By deployment, replica and id."""
        return tuple(self.full_instances.values())

    def held_by(self, instance_id: str) -> list[Grant]:
        """What one instance holds."""
        return [row.value for row in self.grants.values() if row.value.instance_id == instance_id]
