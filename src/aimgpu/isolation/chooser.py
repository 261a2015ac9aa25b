"""Chooses the strongest mechanism that can make a grant true, and says at which level it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Device, Grant, Level, Partition
from aimgpu.errors import NotAllowed
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.protocols import Enforcement, Grouping, Mechanism, Offer, PeakMeter, Resizer, SpaceLimit, UsageMeter

NOTHING = Enforcement(level=Level.NONE, mechanism="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One mechanism's answer for one partition, for `explain`."""

    mechanism: str
    offer: Offer


class MechanismChooser:
    """An isolator over a list of mechanisms; of two with the same level the earlier one wins.

    Companions are added to the chosen mechanism, if they are available: they limit what it does not (compute, turns), and
    never raise the level that is reported. Partners are companions of one mechanism, by its name.
    """

    def __init__(
        self,
        mechanisms: Sequence[Mechanism] = (HardwareBoundary(), EngineFlags()),
        companions: Sequence[Mechanism] = (),
        partners: Mapping[str, Mechanism] | None = None,
    ) -> None:
        self._mechanisms = tuple(mechanisms)
        self._companions = tuple(companions)
        self._partners = dict(partners or {})

    def available_levels(self, device: Device, partition: Partition, *, exclusive: bool) -> frozenset[Level]:
        offers = (choice.offer.level for choice in self.explain(device, partition, exclusive=exclusive))
        return frozenset({Level.NONE, *(level for level in offers if level is not None)})

    def explain(self, device: Device, partition: Partition, *, exclusive: bool) -> tuple[Choice, ...]:
        """Every mechanism with what it gives here, or why it gives nothing."""
        return tuple(
            Choice(mechanism=mechanism.name, offer=mechanism.offer(device, partition, exclusive=exclusive))
            for mechanism in self._mechanisms
        )

    def enforce(self, grant: Grant, device: Device, partition: Partition, *, grouped: bool = True) -> Enforcement:
        """By the strongest mechanism available; `grant.level` is the least that was promised."""
        mechanism = self._strongest(device, partition, exclusive=grant.exclusive, grouped=grouped)
        enforcement = NOTHING
        if mechanism is not None:
            enforcement = mechanism.enforce(self._asked_of(mechanism, mechanism, grant, device, partition), device, partition)
        if enforcement.level.rank < grant.level.rank:
            if mechanism is not None:
                mechanism.release(grant)
            raise self._too_weak(grant, device, partition, enforcement)
        return self._with_companions(enforcement, mechanism, grant, device, partition)

    def release(self, grant: Grant) -> None:
        """Undo what `enforce` prepared. Safe to call twice."""
        for mechanism in dict.fromkeys((*self._mechanisms, *self._companions, *self._partners.values())):
            mechanism.release(grant)

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        """Change the memory limit of a running instance."""
        for mechanism in self._holding(grant):
            if isinstance(mechanism, Resizer):
                mechanism.resize(grant, memory_bytes)

    def read_used_bytes(self, grant: Grant) -> int | None:
        """What the grant's processes use now; None where it is not known."""
        counted = [mechanism.read_used_bytes(grant) for mechanism in self._holding(grant) if isinstance(mechanism, UsageMeter)]
        return max((used for used in counted if used is not None), default=None)

    def read_peak_bytes(self, grant: Grant) -> int | None:
        """The most that they used at once since it was granted; None where it is not known."""
        counted = [one.read_peak_bytes(grant) for one in self._holding(grant) if isinstance(one, PeakMeter)]
        return max((peak for peak in counted if peak is not None), default=None)

    def _holding(self, grant: Grant) -> list[Mechanism]:
        """What makes this grant true, what counts most exactly first: it refuses before anything changed."""
        held = [mechanism for mechanism in self._mechanisms if mechanism.name in grant.mechanisms]
        return sorted(held, key=lambda mechanism: isinstance(mechanism, Grouping))

    def _with_companions(
        self, chosen: Enforcement, by: Mechanism | None, grant: Grant, device: Device, partition: Partition
    ) -> Enforcement:
        partner = self._partners.get(by.name) if by is not None else None
        for companion in (*([partner] if partner else ()), *self._companions):
            if companion is by or companion.offer(device, partition, exclusive=grant.exclusive).level is None:
                continue
            more = companion.enforce(self._asked_of(companion, by, grant, device, partition), device, partition)
            if more.environment:
                chosen = replace(
                    chosen,
                    beside=(*chosen.beside, *more.mechanisms),
                    environment={**more.environment, **chosen.environment},
                )
        return chosen

    def _asked_of(
        self, mechanism: Mechanism, chosen: Mechanism | None, grant: Grant, device: Device, partition: Partition
    ) -> Grant:
        """Without the compute limit where another one that acts on this grant holds it."""
        if isinstance(mechanism, SpaceLimit):
            return grant
        acting = [*([chosen] if chosen else ()), *self._companions]
        held = any(
            isinstance(one, SpaceLimit)
            and one.offer(device, partition, exclusive=grant.exclusive).level is not None
            and one.holds_compute(grant, device, partition)
            for one in acting
        )
        return replace(grant, compute_ppm=None) if held else grant

    def _strongest(self, device: Device, partition: Partition, *, exclusive: bool, grouped: bool) -> Mechanism | None:
        best: tuple[int, Mechanism] | None = None
        for mechanism in self._mechanisms:
            if isinstance(mechanism, Grouping) and not grouped:
                continue
            level = mechanism.offer(device, partition, exclusive=exclusive).level
            if level is not None and (best is None or level.rank > best[0]):
                best = (level.rank, mechanism)
        return None if best is None else best[1]

    def _too_weak(self, grant: Grant, device: Device, partition: Partition, best: Enforcement) -> NotAllowed:
        reasons = [
            f"{choice.mechanism}: {choice.offer.reason}"
            for choice in self.explain(device, partition, exclusive=grant.exclusive)
            if choice.offer.reason is not None
        ]
        return NotAllowed(
            f"{grant.partition_id} can be enforced at level {best.level} at most, {grant.level} was promised"
            + (f" ({'; '.join(reasons)})" if reasons else ""),
            hint="Ask for a weaker isolation, or for a partition of its own.",
        )
