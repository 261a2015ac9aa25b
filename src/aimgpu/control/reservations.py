"""What plans that are being carried out still need: room that is not charged yet, GPUs that change, names that are taken.

In memory only: after a crash the ledger's record of the operation and of what is wanted is enough to repair.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aimgpu.control.loop import Loop
from aimgpu.domain import Grant
from aimgpu.errors import Conflict
from aimgpu.placement import Snapshot

Key = tuple[int, int]  # an operation and one of its chains


@dataclass(slots=True, eq=False)
class DeploymentClaim:
    """One deployment in the hands of one operation, until it is charged or given up."""

    name: str
    revision: str
    replicas: int
    chains: int = 1  # of the operation that are not charged yet, and start some of it
    superseded: bool = False  # another request for it came later
    ended: bool = False
    starting: set[str] = field(default_factory=set)  # instances that the operation started and waits for


class Reservations:
    """Changed on the thread of the loop alone."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._grants: dict[Key, tuple[Grant, ...]] = {}  # by operation and chain
        self._replaced: dict[Key, frozenset[str]] = {}  # instances that end for them, and hold part of that room until then
        self._changing: dict[Key, frozenset[str]] = {}  # partitions that go, by operation
        self._halted: dict[Key, frozenset[str]] = {}  # their GPUs
        self._ending: set[str] = set()  # instances that an operation is about to end
        self._claims: dict[str, DeploymentClaim] = {}

    def claim(self, name: str, revision: str, replicas: int, chains: int = 1) -> DeploymentClaim:
        """Raises Conflict where another operation has it."""
        if name in self._claims:
            raise Conflict(f"{name} is being changed by another operation", hint="Try again when it is done.")
        found = self._claims[name] = DeploymentClaim(name=name, revision=revision, replicas=replicas, chains=chains)
        return found

    def claims_on(self, names: Iterable[str]) -> list[DeploymentClaim]:
        """Those that other operations hold."""
        return [self._claims[name] for name in dict.fromkeys(names) if name in self._claims]

    @property
    def claimed(self) -> frozenset[str]:
        """Deployments in the hands of operations; may be asked for in any thread."""
        return frozenset(tuple(self._claims))

    def amend_claim(self, name: str, *, former: str, revision: str) -> None:
        """What is being started counts as this revision: settings changed that it does not depend on."""
        claim = self._claims.get(name)
        if claim is not None and claim.revision == former:
            claim.revision = revision

    def end_chain(self, claim: DeploymentClaim) -> None:
        """One of its chains is charged; after the last one, others may have the deployment."""
        claim.chains -= 1
        if not claim.chains:
            self.end_claim(claim)

    def end_claim(self, claim: DeploymentClaim) -> None:
        """Safe to call twice."""
        if self._claims.get(claim.name) is claim:
            del self._claims[claim.name]
        claim.ended = True

    def reserve(self, key: Key, grants: Iterable[Grant], replaced: Iterable[str] = ()) -> None:
        """Room that no other plan may use until `drop`; what the instances of `replaced` still hold is part of it."""
        self._grants[key] = tuple(grants)
        self._replaced[key] = frozenset(replaced)

    def charged(self, key: Key, count: int) -> None:
        """The first grants, this many, are charged now; those of later stages stay reserved."""
        self._grants[key] = self._grants[key][count:]

    def drop(self, key: Key) -> None:
        """It is not needed any more."""
        self._grants.pop(key, None)
        self._replaced.pop(key, None)

    @property
    def reserving(self) -> frozenset[Key]:
        """Chains that keep room for a start to come."""
        return frozenset(key for key, grants in self._grants.items() if grants)

    def holds(self, partitions: Iterable[str]) -> bool:
        """Whether room is reserved on one of these, or its layout changes already."""
        wanted = set(partitions)
        reserved = {grant.partition_id for grants in self._grants.values() for grant in grants}
        return bool(wanted & reserved) or any(wanted & changing for changing in self._changing.values())

    def claims_for_room_on(self, partitions: Iterable[str]) -> list[DeploymentClaim]:
        """Those of operations that will charge room on one of these partitions."""
        wanted = set(partitions)
        reserved = [grant for grants in self._grants.values() for grant in grants if grant.partition_id in wanted]
        return self.claims_on(grant.deployment for grant in reserved)

    def is_ending(self, instance_id: str) -> bool:
        """Whether an operation ends it."""
        return instance_id in self._ending

    def begin_ending(self, instance_ids: Iterable[str]) -> None:
        """These end now, so no other plan counts on moving them."""
        self._ending |= set(instance_ids)

    def stop_ending(self, instance_ids: Iterable[str]) -> None:
        """They ended, or stay."""
        self._ending -= set(instance_ids)

    def block(self, key: Key, partitions: Iterable[str], devices: Iterable[str]) -> None:
        """Place nothing on these GPUs until `unblock`, since their partitions will be removed."""
        self._halted[key] = frozenset(devices)
        self._loop.layouts_version += 1
        self._changing[key] = frozenset(partitions)

    def unblock(self, key: Key) -> None:
        """Safe to call twice."""
        if self._changing.pop(key, None) is not None:
            self._loop.layouts_version += 1
        self._halted.pop(key, None)

    @property
    def layouts_change(self) -> bool:
        """Whether a change of layout is under way."""
        return bool(self._changing)

    def leave_room(self, capacity: Mapping[str, int], grants: Sequence[Grant]) -> dict[str, int]:
        """What may be charged on each partition so that reserved room stays free."""
        left = dict(capacity)
        for grant in (one for key in self._grants for one in self._still_needed(key, grants)):
            if grant.partition_id in left:
                left[grant.partition_id] -= left[grant.partition_id] if grant.exclusive else grant.memory_bytes
        return left

    def _still_needed(self, key: Key, grants: Iterable[Grant]) -> list[Grant]:
        """What the chain needs beyond what the instances that it ends still hold on the same partitions."""
        held: dict[str, int] = {}
        for grant in grants:
            if grant.instance_id in self._replaced[key]:
                held[grant.partition_id] = held.get(grant.partition_id, 0) + grant.memory_bytes
        needed = []
        for grant in self._grants[key]:
            left = grant.memory_bytes - held.get(grant.partition_id, 0)
            held[grant.partition_id] = max(0, -left)
            if left > 0 or grant.exclusive:
                needed.append(grant if grant.exclusive else replace(grant, memory_bytes=left))
        return needed

    def apply_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot that other plans may use: reserved room is taken, GPUs that change are not there."""
        held = [grant for _, state in snapshot.devices() for grant in state.grants]
        spoken_for = {
            (name, grant.partition_id)
            for key, grants in self._grants.items()
            for name in self._replaced[key]
            for grant in grants
        }
        reserved = [grant for key in self._grants for grant in self._still_needed(key, held)]
        gone = {device_id for devices in self._halted.values() for device_id in devices}
        if not reserved and not gone and not spoken_for and not self._ending:
            return snapshot

        def left(grant: Grant) -> Grant:
            """Another plan that ends it too has not its room."""
            taken = (grant.instance_id, grant.partition_id) in spoken_for
            return replace(grant, instance_id=f"{grant.instance_id}/reserved") if taken else grant

        running = {name: ask for name, ask in snapshot.running.items() if name not in self._ending}
        nodes = tuple(
            replace(
                node,
                devices=tuple(
                    replace(
                        state,
                        grants=(*map(left, state.grants), *(one for one in reserved if one.device_id == state.device.id)),
                    )
                    for state in node.devices
                    if state.device.id not in gone
                ),
            )
            for node in snapshot.nodes
        )
        return replace(snapshot, nodes=nodes, running=running)
