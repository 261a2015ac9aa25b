"""What is asked for, and how often: all that prices are made from."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from aimgpu.domain import Ask, Auto, Fraction, IsolationRequirement, Memory, Spread, Want, Whole
from aimgpu.placement.snapshot import Snapshot
from aimgpu.units import PPM

_Key = tuple[
    Want, int | None, int, int | None, IsolationRequirement, int, frozenset[str], frozenset[str], str | None, str | None, Spread
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Shapes of Asks with their counts. An Ask's name, priority and company do not matter to its shape."""

    counts: tuple[tuple[Ask, int], ...] = ()

    @classmethod
    def of(cls, asks: Iterable[Ask]) -> "Mix":
        return cls(counts=_sorted(_counted(asks)))

    @classmethod
    def given(cls, snapshot: Snapshot) -> "Mix":
        """Learned from what runs. An Ask that was sized elsewhere counts with the bytes that its instance was given."""
        given = {grant.instance_id: grant.memory_bytes for _, state in snapshot.devices() for grant in state.grants}
        asks = (_sized(ask, given.get(instance_id)) for instance_id, ask in snapshot.running.items())
        return cls.of(ask for ask in asks if ask is not None)

    def with_asks(self, asks: Iterable[Ask]) -> "Mix":
        """Learned from what was asked as well."""
        return Mix(counts=_sorted(Counter(dict(self.counts)) + _counted(asks)))


def shape_of(ask: Ask) -> Ask:
    """The Ask without what does not change its size or where it may go."""
    return _shape(*_key(ask))


def _key(ask: Ask) -> _Key:
    """What Asks of one shape share: quicker to compare than the shapes."""
    size = (ask.want, ask.footprint_bytes, ask.devices, ask.compute_ppm, ask.isolation, ask.cpu_millis)
    return (*size, ask.products, ask.refused_products, ask.vendor, ask.refused_vendor, ask.spread)


@lru_cache(maxsize=4096)
def _shape(  # noqa: PLR0913, PLR0917 - what an Ask is made of
    want: Want,
    footprint_bytes: int | None,
    devices: int,
    compute_ppm: int | None,
    demand: IsolationRequirement,
    cpu_millis: int,
    products: frozenset[str],
    refused_products: frozenset[str],
    vendor: str | None,
    refused_vendor: str | None,
    spread: Spread,
) -> Ask:
    return Ask(
        name="",
        want=want,
        footprint_bytes=footprint_bytes,
        devices=devices,
        compute_ppm=compute_ppm,
        isolation=demand,
        cpu_millis=cpu_millis,
        products=products,
        refused_products=refused_products,
        vendor=vendor,
        refused_vendor=refused_vendor,
        spread=spread,
    )


def _counted(asks: Iterable[Ask]) -> Counter[Ask]:
    return Counter({_shape(*key): count for key, count in Counter(map(_key, asks)).items()})


def _sorted(counted: Mapping[Ask, int]) -> tuple[tuple[Ask, int], ...]:
    """In an order that does not depend on who asked first."""
    return tuple(sorted(counted.items(), key=lambda item: _order(item[0])))


@lru_cache(maxsize=4096)
def _order(shape: Ask) -> str:
    """A set's repr differs from process to process, so its members are sorted."""
    plain = replace(shape, products=frozenset(), refused_products=frozenset())
    return repr((plain, sorted(shape.products), sorted(shape.refused_products)))


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
