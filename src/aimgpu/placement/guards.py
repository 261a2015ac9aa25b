"""What a placement does to its node beyond the cells: Devices without CPU, CPU without Devices, empty nodes opened."""

import numpy as np

from aimgpu.placement.fleet import MICRO, UNLIMITED, Fleet
from aimgpu.placement.kinds import NEVER, Kind, Nodes
from aimgpu.placement.market import Market
from aimgpu.placement.prices import UNIT, Table


class Guards:
    """Each node's standing in score, so that rating a kind is one subtraction a guard."""

    def __init__(self, fleet: Fleet, market: Market) -> None:
        self._fleet = fleet
        weights = market.weights
        self._strand_score = round(weights.strand * UNIT / MICRO)  # a millionth of a Device
        self._spare_score = round(weights.spare * UNIT / 10_000)  # a thousandth of a core
        self._fit_devices = round(weights.fit * UNIT / 8)  # a Device
        self._fit_cpu = round(weights.fit * UNIT / 128_000)
        self._strand_ratio, self._spare_ratio = market.strand_ratio, market.spare_ratio
        count = len(fleet.nodes)
        self._strand, self._spare, self._base = (np.zeros(count, dtype=np.int64) for _ in range(3))
        for node in range(count):
            self.renew(node)

    def renew(self, node: int) -> None:
        """After the node's free CPU or Devices changed."""
        cpu, devices = int(self._fleet.cpu[node]), int(self._fleet.devices[node])
        fit = self._fit_devices * devices // MICRO
        if cpu >= UNLIMITED or self._strand_ratio is None or self._spare_ratio is None:
            self._strand[node] = self._spare[node] = NEVER
            self._base[node] = -fit
            return
        over, under = self._strand_ratio.numerator, self._strand_ratio.denominator
        strand = (devices - cpu * MICRO * under // over) * self._strand_score
        over, under = self._spare_ratio.numerator, self._spare_ratio.denominator
        spare = (cpu - devices * over // (under * MICRO)) * self._spare_score
        self._strand[node], self._spare[node] = strand, spare
        self._base[node] = max(strand, 0) + max(spare, 0) - fit - self._fit_cpu * cpu

    def rate(self, kind: Kind, nodes: Nodes) -> Table:
        """Score of these nodes for the kind, its cells left out."""
        strand = self._strand.take(nodes)
        strand -= kind.strand_shift * self._strand_score
        np.maximum(strand, 0, out=strand)
        spare = self._spare.take(nodes)
        spare -= kind.spare_shift * self._spare_score
        np.maximum(spare, 0, out=spare)
        score = self._base.take(nodes)
        score -= strand
        score -= spare
        return score
