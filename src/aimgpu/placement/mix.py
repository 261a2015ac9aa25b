"""What is asked for, and how often: all that prices are made from."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from aimgpu.domain import Ask, Auto, Fraction, Memory, Priority, Whole
from aimgpu.placement.snapshot import Snapshot
from aimgpu.units import PPM


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Shapes of Asks with their counts. An Ask's name, priority and company do not matter to its shape."""

    counts: tuple[tuple[Ask, int], ...] = ()

    @classmethod
    def of(cls, asks: Iterable[Ask]) -> "Mix":
        counted = Counter(map(shape_of, asks))
        return cls(counts=tuple(sorted(counted.items(), key=lambda item: repr(item[0]))))

    @classmethod
    def given(cls, snapshot: Snapshot) -> "Mix":
        """Learned from what runs. An Ask that was sized elsewhere counts with the bytes that its instance was given."""
        given = {grant.instance_id: grant.memory_bytes for _, state in snapshot.devices() for grant in state.grants}
        asks = (_sized(ask, given.get(instance_id)) for instance_id, ask in snapshot.running.items())
        return cls.of(ask for ask in asks if ask is not None)

    def with_asks(self, asks: Iterable[Ask]) -> "Mix":
        """Learned from what was asked as well."""
        counted = Counter(dict(self.counts))
        counted.update(map(shape_of, asks))
        return Mix(counts=tuple(sorted(counted.items(), key=lambda item: repr(item[0]))))


def shape_of(ask: Ask) -> Ask:
    """The Ask without what does not change its size or where it may go."""
    return replace(
        ask,
        name="",
        deployment=None,
        priority=Priority.MEDIUM,
        partition_id=None,
        pinned=False,
        with_deployments=frozenset(),
        not_with_deployments=frozenset(),
        host_memory_bytes=0,
    )


def _sized(ask: Ask, granted_bytes: int | None) -> Ask | None:
    if not isinstance(ask.want, Auto) or ask.footprint_bytes is not None:
        return ask
    return None if granted_bytes is None else replace(ask, footprint_bytes=granted_bytes)


def devices_ppm(ask: Ask, device_bytes: int) -> int:
    """How much of Devices of this size an Ask takes, in millionths of one."""
    want = ask.want
    if isinstance(want, Whole):
        return max(want.count, ask.devices) * PPM
    if isinstance(want, Fraction):
        return want.ppm * ask.devices
    memory_bytes = want.memory_bytes if isinstance(want, Memory) else ask.footprint_bytes or 0
    return min(memory_bytes * PPM // max(device_bytes, 1), PPM) * ask.devices
