"""The engine kept over many decisions: one Fleet, one Market, score caches a request kind."""

from collections.abc import Mapping

from aimgpu.domain import Ask, Decision, Placement, Slot, Spread
from aimgpu.errors import InvalidInput, UnknownPartition
from aimgpu.placement.chooser import Chooser
from aimgpu.placement.fleet import Charge, Fleet, charge_of
from aimgpu.placement.kinds import Kind
from aimgpu.placement.market import Market
from aimgpu.placement.mix import Mix
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.refusal import refuse
from aimgpu.placement.snapshot import Snapshot
from aimgpu.placement.weights import COMING_AND_GOING, Weights
from aimgpu.units import format_bytes


class Engine:
    """Decides on its own copy of the world; `place` also charges it, so that the next Ask sees it.

    `mix` defaults to what runs in the Snapshot. `reserved` holds nodes for Asks of at least so many Devices, by node name.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        mix: Mix | None = None,
        weights: Weights = COMING_AND_GOING,
        reserved: Mapping[str, int] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._pending: list[tuple[Ask, Placement]] = []
        self._charges: dict[str, Charge] = {}
        self._reserved = dict(reserved or {})
        self.fleet = Fleet(snapshot)
        self.mix = Mix.given(snapshot) if mix is None else mix
        self.chooser = Chooser(self.fleet, Market(self.fleet, self.mix, weights), reserved=reserved)

    @property
    def snapshot(self) -> Snapshot:
        """The world with every Placement so far carried out."""
        if self._pending:
            self._snapshot = self._snapshot.with_placements(self._pending)
            self._pending.clear()
        return self._snapshot

    def decide(self, ask: Ask) -> Decision:
        """Where this Ask goes, nothing charged. Raises InvalidInput or UnknownPartition where the Ask itself is wrong."""
        need, charge = self._find(ask)
        if charge is None:
            return refuse(self.snapshot, need, self._reserved)
        return self._placement(need, charge)

    def place(self, ask: Ask) -> Decision:
        """As `decide`, and what was decided is charged."""
        need, charge = self._find(ask)
        if charge is None:
            return refuse(self.snapshot, need, self._reserved)
        placement = self._placement(need, charge)
        self.chooser.take(charge)
        self._charges[ask.name] = charge
        self._pending.append((ask, placement))
        return placement

    def release(self, instance_id: str) -> None:
        """Give back what an instance holds; one that holds nothing is no error."""
        before = self.snapshot
        charge = self._charges.pop(instance_id, None) or charge_of(self.fleet, before, instance_id)
        if charge is not None:
            self.chooser.release(charge)
            self._snapshot = before.without_instance(instance_id)

    def need_of(self, ask: Ask) -> Need:
        """What the Ask comes to here. Raises InvalidInput or UnknownPartition where it is wrong."""
        need = resolve_need(ask)
        if not need.count:
            raise InvalidInput(f"{ask.name} asks for no Device", hint="Ask for 1 or more.")
        if ask.partition_id is not None and ask.partition_id not in self.fleet.cells:
            raise UnknownPartition(
                f"there is no Partition {ask.partition_id}", hint="`aimgpu gpus` lists the Partitions there are."
            )
        return need

    def _find(self, ask: Ask) -> tuple[Need, Charge | None]:
        need = self.need_of(ask)
        kind = self.chooser.kind_of(need)
        node = self.chooser.choose(kind, ask.host_memory_bytes)
        return need, None if node is None else self.chooser.charge_for(kind, node, ask)

    def _placement(self, need: Need, charge: Charge) -> Placement:
        kind = self.chooser.kind_of(need)
        slots = tuple(self._slot(kind, charge, number) for number in range(len(charge.cells)))
        return Placement(ask=need.ask.name, slots=slots, because=self._because(need, charge, slots))

    def _slot(self, kind: Kind, charge: Charge, number: int) -> Slot:
        fleet, cell = self.fleet, charge.cells[number]
        partition = fleet.partition_at(charge.node, cell)
        terms = kind.terms[fleet.trait[charge.node, cell]]
        return Slot(
            node=fleet.nodes[charge.node].name,
            device_id=partition.device_id,
            partition_id=partition.id,
            memory_bytes=terms.memory_bytes if terms else 0,
            compute_ppm=kind.need.ask.compute_ppm,
            exclusive=terms.exclusive if terms else False,
        )

    def _because(self, need: Need, charge: Charge, slots: tuple[Slot, ...]) -> str:
        if need.ask.partition_id is not None:
            return f"{need.ask.partition_id} was asked for by name"
        if need.ask.spread is Spread.SPREAD:
            how = "the emptiest Device"
        elif self.mix.counts:
            shapes = len(self.mix.counts)
            how = f"the least loss to the {shapes} shapes that are asked for here" if shapes > 1 else "the tightest fit"
        else:
            how = "the tightest fit"
        where = f"{need.count} Devices of {slots[0].node}, " if need.count > 1 else ""
        if slots[0].exclusive:
            return f"{where}{how}; each Partition is its own"
        left = max(
            int(self.fleet.free[charge.node, cell]) - taken
            for cell, taken in zip(charge.cells, charge.memory_bytes, strict=True)
        )
        return f"{where}{how}: {format_bytes(left)} of the Partition stays free"
