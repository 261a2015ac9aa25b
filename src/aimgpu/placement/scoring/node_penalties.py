"""What a placement does to its node beyond the cells: Devices without CPU or host memory, CPU without devices, nodes opened."""

from fractions import Fraction as Ratio

import numpy as np

from aimgpu.placement.scoring.compiled_ask import NEVER, CompiledAsk, Nodes
from aimgpu.placement.scoring.fleet import MICRO, UNLIMITED, Fleet
from aimgpu.placement.scoring.prices import UNIT, Table
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.units import MIB

_STRAND, _SPARE, _BASE, _CPU = range(4)
_FAR = 1 << 51
_MOST_MIB = 4 << 20  # 4 TiB; what is not known counts as this


class NodePenalties:
    """Each node's standing in score, one column a node, so that rating a kind is one subtraction."""

    def __init__(self, fleet: Fleet, valuation: Valuation) -> None:
        self._fleet = fleet
        weights = valuation.weights
        self._strand_score = round(weights.strand * UNIT / MICRO)  # a millionth of a device
        self._spare_score = round(weights.spare * UNIT / 10_000)  # a thousandth of a core
        self._fit_devices = round(weights.fit * UNIT / 8)  # a device
        self._fit_cpu = round(weights.fit * UNIT / 128_000)
        self._fit_host = round(weights.fit * UNIT / (512 * 1024))  # a MiB
        self._host_mib = valuation.host_mib
        self.host_score = round(weights.host * UNIT / MICRO)  # a millionth of a device
        # Millionths of devices that are free without the host memory to go with them; below 0, host memory is left over.
        self.short = np.zeros(len(fleet.nodes), dtype=np.int64)
        self._ratios = _in_millionths(valuation.strand_ratio, valuation.spare_ratio)
        self._standing = np.zeros((4, len(fleet.nodes)), dtype=np.int64)
        for node in range(len(fleet.nodes)):
            self.renew(node)

    def renew(self, node: int) -> None:
        """After the node's free CPU, host memory or devices changed."""
        cpu, devices = self._fleet.cpu.item(node), self._fleet.devices.item(node)
        fit = self._fit_devices * devices // MICRO
        if self._host_mib:
            mib = max(min(self._fleet.host.item(node) // MIB, _MOST_MIB), -_MOST_MIB)
            self.short[node] = short = devices - mib * MICRO // self._host_mib
            fit += self._fit_host * mib - max(short, 0) * self.host_score
        if cpu >= UNLIMITED or self._ratios is None:
            strand = spare = NEVER
            base = -fit
        else:
            (over, under), (spare_over, spare_under) = self._ratios
            strand = _bounded((devices - cpu * under // over) * self._strand_score)
            spare = _bounded((cpu - devices * spare_over // spare_under) * self._spare_score)
            base = max(strand, 0) + max(spare, 0) - fit - self._fit_cpu * cpu
        standing = self._standing  # item by item: one assignment of a tuple takes longer
        standing[_STRAND, node], standing[_SPARE, node] = strand, spare
        standing[_BASE, node], standing[_CPU, node] = base, cpu

    def rate(self, compiled: CompiledAsk, nodes: Nodes) -> Table:
        """Score of these nodes for the kind, its cells left out; NEVER where the CPU is short."""
        standing = self._standing.take(nodes, axis=1)
        score: Table = standing[_BASE]
        if self._ratios is not None:
            shift = compiled.shift if compiled.shift is not None else self._shift_of(compiled)
            lost = np.maximum(
                standing[: _SPARE + 1], shift
            )  # more than what is lost by `shift`, which is the same on all nodes
            score -= lost[_STRAND]
            score -= lost[_SPARE]
        if compiled.cpu_millis:
            score[standing[_CPU] < compiled.cpu_millis] = NEVER
        return score

    def _shift_of(self, compiled: CompiledAsk) -> Table:
        shifts = (_bounded(compiled.strand_shift * self._strand_score), _bounded(compiled.spare_shift * self._spare_score))
        compiled.shift = np.array(shifts, dtype=np.int64).reshape(2, 1)
        return compiled.shift


def _bounded(score: int) -> int:
    """Where somebody asks for absurd amounts: sums of a few stay far above NEVER."""
    return min(max(score, -_FAR), _FAR)


def _in_millionths(strand: Ratio | None, spare: Ratio | None) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Both as numerator and denominator, for devices that are counted in millionths."""
    if strand is None or spare is None:
        return None
    strand, spare = strand / MICRO, spare / MICRO
    return (strand.numerator, strand.denominator), (spare.numerator, spare.denominator)
