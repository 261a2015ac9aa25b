"""A session kept over many decisions: one fleet, one valuation, score caches per kind of request."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from aimgpu.domain import Ask, Decision, Placement, Refusal, Slot, Spread
from aimgpu.errors import InvalidInput, UnknownPartition
from aimgpu.placement.advice.refusal import Case, LateRefusal, World
from aimgpu.placement.affinity import anti_affinity
from aimgpu.placement.journal import Journal
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.scoring.chooser import Chooser
from aimgpu.placement.scoring.compiled_ask import CompiledAsk
from aimgpu.placement.scoring.fleet import Charge, Fleet, charges_of
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.placement.scoring.weights import COMING_AND_GOING, Weights
from aimgpu.placement.snapshot import Snapshot
from aimgpu.units import format_bytes


class PlacementSession:
    """Decides on its own copy of the world; `place` also charges it, so that the next ask sees it.

    `mix` defaults to what runs in the snapshot. `reserved` holds nodes for asks of at least that many whole devices.
    With `planned`, these instances and what this session places do not run yet, and no suggestion is to stop
    them. A refusal works out its reasons when they are looked at, for the world as it was when it was refused.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        mix: Mix | None = None,
        weights: Weights = COMING_AND_GOING,
        reserved: Mapping[str, int] | None = None,
        planned: Collection[str] | None = None,
    ) -> None:
        self._journal = Journal(snapshot)
        self._first = snapshot
        self._placed: dict[str, tuple[Charge, ...]] = {}
        self._held: dict[str, Charge] | None = None  # by those who ran before; found when the first of them leaves
        self._reserved = dict(reserved or {})
        self._avoided_by = anti_affinity(snapshot.running.values())
        self._planned = None if planned is None else frozenset(planned)
        self.fleet = Fleet(snapshot)
        self.mix = Mix.given(snapshot) if mix is None else mix
        self.chooser = Chooser(self.fleet, Valuation(self.fleet, self.mix, weights), reserved=reserved)
        varied = len(self.mix.counts) > 1
        self._how = "the place that leaves the most room for more of what is deployed" if varied else "the tightest fit"

    @property
    def snapshot(self) -> Snapshot:
        """The world with every placement and release so far carried out."""
        return self._journal.snapshot()

    def decide(self, ask: Ask) -> Decision:
        """Where this ask goes, nothing charged. Raises InvalidInput or UnknownPartition where the ask itself is wrong."""
        compiled = self._compiled_for(ask)
        charge = self._find(compiled, ask)
        return self._refusal(ask) if charge is None else self._placement(compiled, ask, charge)

    def place(self, ask: Ask) -> Decision:
        """As `decide`, and what was decided is charged."""
        compiled = self._compiled_for(ask)
        charge = self._find(compiled, ask)
        if charge is None:
            return self._refusal(ask)
        placement = self._placement(compiled, ask, charge)
        self.chooser.take(charge)
        self._placed[ask.name] = (*self._placed.get(ask.name, ()), charge)
        self._journal.placed(ask, placement)
        if ask.not_with_deployments:
            for name, others in anti_affinity([ask]).items():
                self._avoided_by[name] = self._avoided_by.get(name, frozenset()) | others
        return placement

    def release(self, instance_id: str) -> None:
        """Give back what an instance holds; one that holds nothing is not an error."""
        if self._held is None:
            self._held = charges_of(self.fleet, self._first)
        before = self._held.pop(instance_id, None)
        charges = (*self._placed.pop(instance_id, ()), *((before,) if before else ()))
        for charge in charges:
            self.chooser.release(charge)
        if charges:
            self._journal.released(instance_id)

    def need_of(self, ask: Ask) -> Need:
        """What the ask comes to here. Raises InvalidInput or UnknownPartition where it is wrong."""
        need = resolve_need(ask, self._avoiders(ask))
        if not need.count:
            raise InvalidInput(f"{ask.name} requests no GPU", hint="Request 1 or more.")
        if ask.partition_id is not None and ask.partition_id not in self.fleet.cells:
            raise UnknownPartition(
                f"there is no partition {ask.partition_id}",
                hint="`aimgpu gpus` lists the partitions.",
                page_hint="The bars of the GPUs show them.",
            )
        return need

    def how(self, ask: Ask) -> str:
        """By what rule the place of this ask is chosen."""
        if ask.partition_id is not None:
            return f"{ask.partition_id} was requested by name"
        return "the emptiest GPU" if ask.spread is Spread.SPREAD else self._how

    def _compiled_for(self, ask: Ask) -> CompiledAsk:
        """A wrong ask is found when it is compiled, except for the host memory, which is not part of a compiled ask."""
        if ask.host_memory_bytes < 0:
            self.need_of(ask)
        return self.chooser.compiled_for(ask, self.need_of, self._avoiders(ask))

    def _avoiders(self, ask: Ask) -> frozenset[str]:
        return self._avoided_by.get(ask.deployment or ask.name, frozenset()) if self._avoided_by else frozenset()

    def _find(self, compiled: CompiledAsk, ask: Ask) -> Charge | None:
        node = self.chooser.choose(compiled, ask.host_memory_bytes)
        return None if node is None else self.chooser.charge_for(compiled, node, ask)

    def _refusal(self, ask: Ask) -> Refusal:
        world = partial(_world, self._journal.moment(), self._first, self._planned)
        return LateRefusal(ask.name, Case(world, ask, self._reserved, self._avoiders(ask)))

    def _placement(self, compiled: CompiledAsk, ask: Ask, charge: Charge) -> Placement:
        slots = tuple([self._slot(compiled, charge.node, cell) for cell in charge.cells])
        return Placement(ask=ask.name, slots=slots, because=self._because(ask, charge, slots))

    def _slot(self, compiled: CompiledAsk, node: int, cell: int) -> Slot:
        fleet = self.fleet
        partition = fleet.partition_at(node, cell)
        terms = self.chooser.terms_at(compiled, node, cell)
        return Slot(
            node=fleet.nodes[node].name,
            device_id=partition.device_id,
            partition_id=partition.id,
            memory_bytes=terms.memory_bytes,
            compute_ppm=terms.compute_ppm,
            exclusive=terms.exclusive,
        )

    def _because(self, ask: Ask, charge: Charge, slots: tuple[Slot, ...]) -> str:
        free, node, taken = self.fleet.free, charge.node, charge.memory_bytes
        left = [free.item(node, cell) - taken[number] for number, cell in enumerate(charge.cells)]
        return placement_reason(self.how(ask), slots, left)


def placement_reason(how: str, slots: Sequence[Slot], left_bytes: Sequence[int]) -> str:
    """Why there, in a sentence; `left_bytes` is what stays free on the partition of each slot."""
    where = f"{len(slots)} GPUs of {slots[0].node}, " if len(slots) > 1 else ""
    if slots[0].exclusive:
        return f"{where}{how}; the partition is not shared"
    return f"{where}{how}: {format_bytes(max(left_bytes))} of the partition stays free"


def _world(moment: Callable[[], Snapshot], first: Snapshot, planned: frozenset[str] | None) -> World:
    now = moment()
    return now, frozenset() if planned is None else planned | (_instances(now) - _instances(first))


def _instances(snapshot: Snapshot) -> set[str]:
    return {grant.instance_id for _, state in snapshot.devices() for grant in state.grants}
