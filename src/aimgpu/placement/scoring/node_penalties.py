"""What a placement does to its node beyond the cells: Devices without CPU, CPU without Devices, empty nodes opened."""

import numpy as np

from aimgpu.placement.scoring.compiled_ask import NEVER, CompiledAsk, Nodes
from aimgpu.placement.scoring.fleet import MICRO, UNLIMITED, Fleet
from aimgpu.placement.scoring.prices import UNIT, Table
from aimgpu.placement.scoring.valuation import Valuation

_STRAND, _SPARE, _BASE, _CPU = range(4)


class NodePenalties:
    """Each node's standing in score, one column a node, so that rating a kind is one subtraction."""

    def __init__(self, fleet: Fleet, valuation: Valuation) -> None:
        self._fleet = fleet
        weights = valuation.weights
        self._strand_score = round(weights.strand * UNIT / MICRO)  # a millionth of a Device
        self._spare_score = round(weights.spare * UNIT / 10_000)  # a thousandth of a core
        self._fit_devices = round(weights.fit * UNIT / 8)  # a Device
        self._fit_cpu = round(weights.fit * UNIT / 128_000)
        ratios = (valuation.strand_ratio, valuation.spare_ratio)
        self._ratios = (
            None if None in ratios else [(ratio.numerator, ratio.denominator) for ratio in ratios if ratio is not None]
        )
        self._standing = np.zeros((4, len(fleet.nodes)), dtype=np.int64)
        for node in range(len(fleet.nodes)):
            self.renew(node)

    def renew(self, node: int) -> None:
        """After the node's free CPU or Devices changed."""
        cpu, devices = self._fleet.cpu.item(node), self._fleet.devices.item(node)
        fit = self._fit_devices * devices // MICRO
        if cpu >= UNLIMITED or self._ratios is None:
            self._standing[:, node] = (NEVER, NEVER, -fit, cpu)
            return
        (over, under), (spare_over, spare_under) = self._ratios
        strand = (devices - cpu * MICRO * under // over) * self._strand_score
        spare = (cpu - devices * spare_over // (spare_under * MICRO)) * self._spare_score
        base = max(strand, 0) + max(spare, 0) - fit - self._fit_cpu * cpu
        self._standing[:, node] = (strand, spare, base, cpu)

    def rate(self, kind: CompiledAsk, nodes: Nodes) -> Table:
        """Score of these nodes for the kind, its cells left out; NEVER where the CPU is short."""
        standing = self._standing.take(nodes, axis=1)
        score: Table = standing[_BASE]
        if self._ratios is not None:
            lost = standing[: _SPARE + 1]
            lost -= self._shift_of(kind)
            np.maximum(lost, 0, out=lost)
            score -= lost[_STRAND]
            score -= lost[_SPARE]
        if kind.cpu_millis:
            score[standing[_CPU] < kind.cpu_millis] = NEVER
        return score

    def _shift_of(self, kind: CompiledAsk) -> Table:
        if kind.shift is None:
            shifts = (kind.strand_shift * self._strand_score, kind.spare_shift * self._spare_score)
            kind.shift = np.array(shifts, dtype=np.int64).reshape(2, 1)
        return kind.shift
