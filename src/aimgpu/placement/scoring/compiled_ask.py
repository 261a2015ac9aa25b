"""Request kinds: a need compiled against the partition classes and prices of a fleet."""

from fractions import Fraction as Ratio

import numpy as np
import numpy.typing as npt

from aimgpu.domain import Spread
from aimgpu.placement.need import Need
from aimgpu.placement.scoring.fleet import MICRO, ROW, Fleet
from aimgpu.placement.scoring.partition_class import PartitionClass, Terms, terms_for
from aimgpu.placement.scoring.prices import STEPS, UNIT, Table
from aimgpu.placement.scoring.valuation import Valuation

Nodes = npt.NDArray[np.intp]  # numbers of nodes
NEVER = -(1 << 55)  # score of what does not fit; sums of a few stay far below any real score
_LEFT = np.arange(ROW, dtype=np.int64)
ALONE = 64 * UNIT  # taking a whole partition where a share was wanted comes after every share


class CompiledAsk:
    """How one need scores every cell: `gain[code]`, with the exact bytes checked apart."""

    def __init__(self, need: Need, fleet: Fleet, valuation: Valuation) -> None:
        self.need = need
        self.fresh = True  # nothing was chosen for it yet
        self.count = need.count
        self.whole_devices = need.whole_devices
        self.cpu_millis = need.ask.cpu_millis
        self.spread = need.ask.spread is Spread.SPREAD
        self.affinity = bool(need.ask.with_deployments or need.avoided or need.ask.partition_id)
        self.terms: list[Terms | None] = [
            None if partition_class is None else terms_for(need, partition_class) for partition_class in fleet.classes
        ]
        self.gain = np.empty(len(fleet.classes) * ROW, dtype=np.int64)
        for number, (partition_class, terms) in enumerate(zip(fleet.classes, self.terms, strict=True)):
            row = self.gain[number * ROW : (number + 1) * ROW]
            if partition_class is None or terms is None:
                row.fill(NEVER)
            else:
                _fill_row(row, partition_class, terms, valuation)
        self.shared_bytes = _shared_bytes(self.terms)
        self.compute = _compute(self.terms) if need.ask.compute_ppm else None
        micro = [_micro(partition_class, terms) for partition_class, terms in zip(fleet.classes, self.terms, strict=True)]
        self.devices_micro = max(micro, default=0) * self.count
        self.shift: Table | None = None  # both below in score, kept by the guards
        self.strand_shift = self.devices_micro - _whole(self.cpu_millis * MICRO, valuation.strand_ratio)
        self.spare_shift = self.cpu_millis - _whole(self.devices_micro, valuation.spare_ratio, MICRO)


def _shared_bytes(terms: list[Terms | None]) -> int | Table | None:
    """Bytes that a share needs: one number, or one per partition class, or None where only whole partitions are taken."""
    wanted = [0 if each is None or each.exclusive else each.memory_bytes for each in terms]
    shared = {count for count in wanted if count}
    if not shared:
        return None
    exclusive = any(each is not None and each.exclusive for each in terms)
    return shared.pop() if len(shared) == 1 and not exclusive else np.array(wanted, dtype=np.int64)


def _compute(terms: list[Terms | None]) -> Table:
    """Millionths of a partition, one number per partition class."""
    return np.array([0 if each is None else each.compute_ppm or 0 for each in terms], dtype=np.int64)


def _fill_row(row: Table, partition_class: PartitionClass, terms: Terms, valuation: Valuation) -> None:
    worth = valuation.worth(partition_class)
    if terms.exclusive:
        row.fill(NEVER)
        alone = ALONE if terms.fallback else 0
        row[STEPS] = worth[0] - worth[STEPS] - _scarcity(partition_class, partition_class.cell_bytes, valuation) - alone
        return
    steps = max(-(-terms.memory_bytes * STEPS // partition_class.cell_bytes), 1)
    first = steps - 1  # a step below may still hold the exact bytes; they are checked apart
    tight = round(valuation.weights.tight * UNIT * float(valuation.size_of(partition_class))) // STEPS
    cost = _scarcity(partition_class, terms.memory_bytes, valuation)
    row[:first] = NEVER
    row[first] = worth[0] - cost
    np.subtract(worth[: ROW - steps], _LEFT[: ROW - steps] * tight + cost, out=row[steps:])
    row[first:] -= worth[first:]


def _scarcity(partition_class: PartitionClass, memory_bytes: int, valuation: Valuation) -> int:
    return valuation.scarcity(partition_class) * memory_bytes // partition_class.device_bytes


def _micro(partition_class: PartitionClass | None, terms: Terms | None) -> int:
    return 0 if partition_class is None or terms is None else terms.memory_bytes * MICRO // partition_class.device_bytes


def _whole(amount: int, ratio: Ratio | None, unit: int = 0) -> int:
    """`amount` divided by the ratio, or with `unit` multiplied by it; nothing where there is no ratio."""
    if ratio is None:
        return 0
    return int(amount * ratio / unit) if unit else int(amount / ratio)
