"""What the mix makes of a fleet: the worth of free shares, the price of scarce products, the CPU that goes with a device."""

from collections import Counter
from fractions import Fraction as Ratio
from functools import lru_cache

import numpy as np

from aimgpu.domain import Ask
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.scoring.fleet import Fleet
from aimgpu.placement.scoring.lp import Array
from aimgpu.placement.scoring.mix import Mix, devices_ppm
from aimgpu.placement.scoring.partition_class import PartitionClass, terms_for
from aimgpu.placement.scoring.prices import STEPS, UNIT, Table, share_prices, waste_table, worth_table
from aimgpu.placement.scoring.weights import Weights
from aimgpu.units import MIB, PPM

_MOST_TABLES = 256
_TABLES: dict[tuple[object, ...], tuple[object, Table]] = {}  # with the mix, so that identities stay its own
_MOST_NEEDS = 4096
_NEEDS: dict[int, tuple[Ask, Need]] = {}  # by identity of the shape, which is kept alive here
_LEAN = Ratio(9, 10)
_PLENTY, _BOUND = Ratio(9, 10), Ratio(1)  # CPU wanted per device wanted, over CPU there per device there


class Valuation:
    """Prices of one mix on one fleet. All scores are integers, UNIT for the largest device."""

    def __init__(self, fleet: Fleet, mix: Mix, weights: Weights) -> None:
        self.weights = weights
        self._mix = mix
        self._largest = max(
            (partition_class.device_bytes for partition_class in fleet.classes if partition_class is not None), default=1
        )
        self._tables: dict[tuple[int, int], Table] = {}
        self._scarce = self._scarcity(fleet, mix)
        self.strand_ratio, self.spare_ratio = self._cpu_ratios(fleet, mix)
        self.host_mib = self._host_mib(mix)  # per device: with less, a free device is stranded; 0 where it is not known

    def size_of(self, partition_class: PartitionClass) -> Ratio:
        """A partition in largest devices."""
        return Ratio(partition_class.cell_bytes, self._largest)

    def worth(self, partition_class: PartitionClass) -> Table:
        """Score of 0..STEPS free steps on a partition of this class."""
        key = (partition_class.cell_bytes, partition_class.device_bytes)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._worth(partition_class)
        return table

    def scarcity(self, partition_class: PartitionClass) -> int:
        """Score lost with a whole device of this product."""
        return self._scarce.get(partition_class.product, 0)

    def _worth(self, partition_class: PartitionClass) -> Table:
        """Kept over fleets: the same mix and class give the same table. Shapes are one object each, kept alive with it."""
        mix = self._mix.counts
        key = (partition_class, self._largest, self.weights.waste, *[(id(shape), count) for shape, count in mix])
        known = _TABLES.get(key)
        if known is None:
            if len(_TABLES) >= _MOST_TABLES:
                _TABLES.clear()
            known = _TABLES[key] = (mix, self._new_worth(partition_class))
        return known[1]

    def _new_worth(self, partition_class: PartitionClass) -> Table:
        shares: Counter[int] = Counter()
        asked: Counter[int] = Counter()
        for ask, count in self._mix.counts:
            if ask.devices <= 0:
                continue
            need = _need_of(ask)
            steps = _steps(need, partition_class)
            if steps is not None:
                asked[steps] += count
                if not need.exclusive and steps < STEPS:
                    shares[steps] += count * need.count
        scale = float(UNIT * self.size_of(partition_class))
        return _score_table(tuple(sorted(shares.items())), tuple(sorted(asked.items())), self.weights.waste, scale)

    def _scarcity(self, fleet: Fleet, mix: Mix) -> dict[str, int]:
        """By product: demand that names it over its stock, at most 1, in score."""
        if not any(ask.products for ask, _ in mix.counts):
            return {}
        stock: Counter[str] = Counter()
        cells = np.bincount(fleet.class_numbers.ravel(), minlength=len(fleet.classes)).tolist()
        for partition_class, count in zip(fleet.classes, cells, strict=True):
            if partition_class is not None:
                stock[partition_class.product] += count * partition_class.cell_bytes * PPM // partition_class.device_bytes
        named: Counter[str] = Counter()
        total = 0
        for ask, count in mix.counts:
            wanted = devices_ppm(ask, self._largest) * count
            total += wanted
            products = [product for product in {product.casefold() for product in ask.products} if stock[product]]
            held = sum(stock[product] for product in products)
            for product in products:
                named[product] += wanted * stock[product] // held
        everything = sum(stock.values())
        if not total:
            return {}
        unit = round(self.weights.scarce * UNIT)
        return {
            product: int(min(Ratio(named[product] * everything, total * stock[product]), Ratio(1)) * unit) for product in named
        }

    def _cpu_ratios(self, fleet: Fleet, mix: Mix) -> tuple[Ratio | None, Ratio | None]:
        """CPU millis per device below which a free device is stranded, and above which free CPU is spare."""
        if not any(ask.cpu_millis for ask, _ in mix.counts):
            return None, None
        asks = [(ask.cpu_millis * count, devices_ppm(ask, self._largest) * count) for ask, count in mix.counts]
        with_device = [(cpu, ppm) for cpu, ppm in asks if ppm > 0]
        cpu, ppm = sum(cpu for cpu, _ in with_device), sum(ppm for _, ppm in with_device)
        known = [(node.cpu_millis, len(node.devices)) for node in fleet.nodes if node.cpu_millis is not None]
        devices = sum(count for _, count in known)
        if not cpu or not ppm or not devices:
            return None, None
        mean, overall = Ratio(cpu * PPM, ppm), Ratio(sum(cpu for cpu, _ in asks) * PPM, ppm)
        there = Ratio(sum(millis for millis, _ in known), devices) or Ratio(1)
        bound = min(max((overall / there - _PLENTY) / (_BOUND - _PLENTY), Ratio(0)), Ratio(1))
        lean = max(_quartile(with_device), mean / 8)  # some ask for no CPU at all; a device still needs a little
        return mean + bound * (lean - mean), mean * Ratio(3, 4) + bound * (overall - mean * Ratio(3, 4))

    def _host_mib(self, mix: Mix) -> int:
        """Less than the mean of the mix: small asks can still use a device that is short of host memory."""
        if not mix.host_memory_bytes:
            return 0
        ppm = sum(devices_ppm(ask, self._largest) * count for ask, count in mix.counts)
        return int(_LEAN * mix.host_memory_bytes * PPM / (ppm * MIB)) if ppm else 0


@lru_cache(maxsize=256)
def _score_table(shares: tuple[tuple[int, int], ...], asked: tuple[tuple[int, int], ...], waste: float, scale: float) -> Table:
    """Read-only: equal mixes share one table."""
    score = _worth_of(shares) - waste * waste_table(dict(asked))
    table: Table = np.rint(score * scale).astype(np.int64)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=256)
def _worth_of(shares: tuple[tuple[int, int], ...]) -> Array:
    """The same mix of sizes is priced once."""
    return worth_table(share_prices(dict(shares)))


def _need_of(shape: Ask) -> Need:
    """Shapes of a mix are kept as one object each, so that they are known by identity: hashing an ask takes longer."""
    known = _NEEDS.get(id(shape))
    if known is not None and known[0] is shape:
        return known[1]
    if len(_NEEDS) >= _MOST_NEEDS:
        _NEEDS.clear()
    need = resolve_need(shape)
    _NEEDS[id(shape)] = (shape, need)
    return need


def _steps(need: Need, partition_class: PartitionClass) -> int | None:
    """Thousandths of a partition that the need takes there."""
    terms = terms_for(need, partition_class)
    if terms is None:
        return None
    return STEPS if terms.exclusive else max(-(-terms.memory_bytes * STEPS // partition_class.cell_bytes), 1)


def _quartile(asks: list[tuple[int, int]]) -> Ratio:
    """CPU per device that a quarter of the demand stays below."""
    ratios = sorted((Ratio(cpu * PPM, ppm), ppm) for cpu, ppm in asks)
    quarter, seen = sum(ppm for _, ppm in ratios), 0
    for ratio, ppm in ratios:
        seen += ppm
        if 4 * seen >= quarter:
            return ratio
    return ratios[-1][0]
