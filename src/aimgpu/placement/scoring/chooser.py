"""The best node and cells for a request kind, kept up to date as the fleet changes.

A node's score for a kind depends on that node alone, so scores are kept per kind and renewed only for nodes that changed since.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aimgpu.domain import Ask
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.scoring.compiled_ask import NEVER, CompiledAsk, Nodes
from aimgpu.placement.scoring.fleet import MICRO, Charge, Fleet
from aimgpu.placement.scoring.node_penalties import NodePenalties
from aimgpu.placement.scoring.partition_class import Terms
from aimgpu.placement.scoring.prices import STEPS, UNIT, Table
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.units import MIB

_HARDLY = NEVER // 2  # any real score is above
_CACHE_BYTES = 64 << 20  # of scores, 12 bytes per node and kind; when full it starts over
_HELD = 32 * UNIT  # a reserved node goes first to those it is held for
_FEW = 8  # nodes looked at one by one before many are at once
_TIE = 1024  # what only breaks ties counts this many times less


@dataclass(slots=True)
class _Memory:
    """Scores of one kind, with the first `seen` changes of the fleet in them; below 0 where no node was rated yet."""

    score: Table
    seen: int = -1


class Chooser:
    """Scores are integers, so the same fleet and kind give the same node everywhere."""

    def __init__(self, fleet: Fleet, valuation: Valuation, *, reserved: Mapping[str, int] | None = None) -> None:
        self.fleet, self.valuation = fleet, valuation
        self._made_penalties: NodePenalties | None = None  # when nodes are first compared
        self._just_rated: tuple[CompiledAsk, int, Table] | None = None
        self._compiled: dict[tuple[object, ...], CompiledAsk] = {}
        self._most_compiled = max(_CACHE_BYTES // (12 * max(len(fleet.nodes), 1)), 64)
        self._memories: dict[CompiledAsk, _Memory] = {}
        self._reserved = np.array([(reserved or {}).get(node.name, 0) for node in fleet.nodes], dtype=np.int64)
        self._any_reserved = bool(self._reserved.any())

    def compiled_for(
        self, ask: Ask, resolve: Callable[[Ask], Need] = resolve_need, avoided_by: frozenset[str] = frozenset()
    ) -> CompiledAsk:
        """The compiled kind; asks that differ in name, priority or host memory alone share one, resolved and checked once.

        `resolve` knows who shuns the ask too.
        """
        # Members of an enum are known by identity: they hash in Python, and this is asked for at every decision.
        size = (ask.want, ask.footprint_bytes, ask.devices, ask.compute_ppm, id(ask.isolation), ask.cpu_millis)
        place = (ask.products, ask.refused_products, ask.vendor, ask.refused_vendor, id(ask.spread), ask.partition_id)
        key = (*size, *place, ask.with_deployments, ask.not_with_deployments, avoided_by)
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= self._most_compiled:
                self._compiled.clear()
                self._memories.clear()
            compiled = self._compiled[key] = CompiledAsk(resolve(ask), self.fleet, self.valuation)
        return compiled

    def choose(
        self, compiled: CompiledAsk, host_memory_bytes: int = 0, allowed: npt.NDArray[np.bool_] | None = None
    ) -> int | None:
        """The node that takes it best, the first by name on ties; None where none can. `allowed`: by node; None: all."""
        if compiled.fresh and len(self.fleet.nodes) == 1 and allowed is None:
            compiled.fresh = False
            return 0 if self._only_node_does(compiled, host_memory_bytes) else None
        score = self._scores(compiled)
        if not score.size:
            return None
        if allowed is not None:
            score = np.where(allowed, score, NEVER)
        node = int(score.argmax())
        if score.item(node) < _HARDLY:
            return None
        if self.valuation.host_mib:
            return self._keep_host_memory(compiled, score, node, host_memory_bytes)
        if self.fleet.host[node] < host_memory_bytes:
            score = np.where(self.fleet.host >= host_memory_bytes, score, NEVER)
            node = int(score.argmax())
        return node if score[node] > _HARDLY else None

    def _keep_host_memory(self, compiled: CompiledAsk, score: Table, best: int, host_memory_bytes: int) -> int | None:
        """The best node once devices that would lose the host memory to go with them are counted.

        Host memory is not part of a compiled ask, and so of no score that is kept. Scores only fall by it: where the best loses
        nothing it stays the best, and else only nodes that stand above what is left of its score can come before it.
        """
        shift = host_memory_bytes // MIB * MICRO // self.valuation.host_mib - compiled.devices_micro
        penalties, host = self._penalties, self.fleet.host
        node, most, found = best, _HARDLY, None
        passed: list[tuple[int, int]] = []
        while (top := score.item(node)) > most and len(passed) < _FEW:
            if host.item(node) >= host_memory_bytes:
                rated = top - max(penalties.short.item(node) + shift, 0) * penalties.host_score
                if rated > most:
                    most, found = rated, node
                if rated == top:
                    break
            passed.append((node, top))
            score[node] = NEVER
            node = int(score.argmax())
        for node, top in passed:
            score[node] = top
        return found if len(passed) < _FEW else self._keep_among(score, most, shift, host_memory_bytes)

    def _keep_among(self, score: Table, least: int, shift: int, host_memory_bytes: int) -> int | None:
        """The same for many nodes at once: those with a score of at least `least`."""
        near = (score >= least).nonzero()[0]
        lost = self._penalties.short.take(near)
        lost += shift
        np.maximum(lost, 0, out=lost)
        lost *= self._penalties.host_score
        rated = score.take(near) - lost
        rated[self.fleet.host.take(near) < host_memory_bytes] = NEVER
        first = int(rated.argmax())
        return int(near[first]) if rated[first] > _HARDLY else None

    def _only_node_does(self, compiled: CompiledAsk, host_memory_bytes: int) -> bool:
        """The same for a single machine and a new kind of ask: caching scores pays only when a kind comes again."""
        fleet, held = self.fleet, self._reserved.item(0) if self._any_reserved else 0
        if held > compiled.whole_devices or fleet.cpu.item(0) < compiled.cpu_millis or fleet.host.item(0) < host_memory_bytes:
            return False
        if not compiled.count:
            return True
        gains = self._gains_on(compiled, 0)
        self._just_rated = (compiled, fleet.changed.item(0), gains)
        if compiled.count == 1:
            return bool(gains.max() > _HARDLY)
        best = gains.reshape(fleet.shape[1], fleet.shape[2]).max(axis=1)
        return bool((best > _HARDLY).sum() >= compiled.count)

    def charge_for(
        self, compiled: CompiledAsk, node: int, ask: Ask, host_memory_bytes: int | None = None, *, first: bool = False
    ) -> Charge:
        """What the kind takes on a node that `choose` gave. `first`: of the first devices that do, in place of the best."""
        cells = self._first_cells_on(compiled, node) if first else self._cells_on(compiled, node)
        taken = tuple([max(self.terms_at(compiled, node, cell).memory_bytes, 1) for cell in cells])
        compute: tuple[int, ...] = ()
        if compiled.compute is not None:
            compute = tuple([self.terms_at(compiled, node, cell).compute_ppm or 0 for cell in cells])
        host = ask.host_memory_bytes if host_memory_bytes is None else host_memory_bytes
        return Charge(node, cells, taken, compute, compiled.cpu_millis, host, ask.deployment or ask.name)

    def terms_at(self, compiled: CompiledAsk, node: int, cell: int) -> Terms:
        """How the kind is met on a cell that it was given."""
        terms = compiled.terms[self.fleet.class_numbers.item(node, cell)]
        if terms is None:
            raise ValueError(f"cell {cell} of node {node} cannot do")
        return terms

    def device_gains(self, compiled: CompiledAsk, node: int) -> list[int | None]:
        """Score of the best cell of each device of a node, its node's guards left out; None where it does not fit."""
        _, deep, wide = self.fleet.shape
        best = self._cell_gains(compiled, np.array([node]))[0].reshape(deep, wide).max(axis=1)
        return [int(gain) if gain > _HARDLY else None for gain in best.tolist()]

    def take(self, charge: Charge) -> None:
        self.fleet.take(charge)
        if self._made_penalties is not None:
            self._made_penalties.renew(charge.node)

    def release(self, charge: Charge) -> None:
        self.fleet.release(charge)
        if self._made_penalties is not None:
            self._made_penalties.renew(charge.node)

    @property
    def _penalties(self) -> NodePenalties:
        if self._made_penalties is None:
            self._made_penalties = NodePenalties(self.fleet, self.valuation)
        return self._made_penalties

    def _scores(self, compiled: CompiledAsk) -> Table:
        memory = self._memories.get(compiled)
        if memory is None:
            memory = _Memory(score=np.empty(len(self.fleet.nodes), dtype=np.int64))
            if not compiled.affinity:
                self._memories[compiled] = memory
        fleet = self.fleet
        if memory.seen != fleet.changes:
            stale = (fleet.changed > memory.seen).nonzero()[0]
            memory.score[stale] = self._rate(compiled, stale)
            memory.seen = fleet.changes
        return memory.score

    def _rate(self, compiled: CompiledAsk, nodes: Nodes) -> Table:
        score = self._penalties.rate(compiled, nodes)
        if compiled.count:
            score += self._best_devices(compiled, nodes)
        if self._any_reserved:
            held = self._reserved[nodes]
            score[held > compiled.whole_devices] = NEVER
            score[(held > 0) & (held <= compiled.whole_devices)] += _HELD
        return score

    def _best_devices(self, compiled: CompiledAsk, nodes: Nodes) -> Table:
        """Score of the best `count` devices of each node, one cell on each."""
        if compiled.count == 1:
            best: Table = self._cell_gains(compiled, nodes).max(axis=1)
            return best
        _, deep, wide = self.fleet.shape
        if compiled.count > deep:
            return np.full(len(nodes), NEVER, dtype=np.int64)
        cells = self._cell_gains(compiled, nodes).reshape(len(nodes), deep, wide)
        total: Table = np.sort(cells.max(axis=2), axis=1)[:, -compiled.count :].sum(axis=1)
        return total

    def _cell_gains(self, compiled: CompiledAsk, nodes: Nodes) -> Table:
        """One row a node, one column a cell."""
        fleet = self.fleet
        gains: Table = compiled.gain.take(fleet.code.take(nodes, axis=0))
        if isinstance(compiled.shared_bytes, int):
            gains[fleet.free.take(nodes, axis=0) < compiled.shared_bytes] = NEVER
        elif compiled.shared_bytes is not None:
            gains[fleet.free[nodes] < compiled.shared_bytes[fleet.class_numbers[nodes]]] = NEVER
        if compiled.compute is not None:
            gains[fleet.compute[nodes] < compiled.compute[fleet.class_numbers[nodes]]] = NEVER
        if compiled.affinity:
            gains[~self._affinity_cells(compiled)[nodes]] = NEVER
        return self._spread(gains, nodes) if compiled.spread else gains

    def _rated_on(self, compiled: CompiledAsk, node: int) -> Table:
        """As `choose` has just rated the only node, if it has."""
        just, self._just_rated = self._just_rated, None
        if just is not None and just[0] is compiled and just[1] == self.fleet.changed.item(node):
            return just[2]
        return self._gains_on(compiled, node)

    def _gains_on(self, compiled: CompiledAsk, node: int) -> Table:
        """The same for one node, without the copies."""
        if (
            compiled.spread
            or compiled.affinity
            or not (compiled.shared_bytes is None or isinstance(compiled.shared_bytes, int))
        ):
            row: Table = self._cell_gains(compiled, np.array([node]))[0]
            return row
        gains: Table = compiled.gain.take(self.fleet.code[node])
        if compiled.shared_bytes is not None:
            gains[self.fleet.free[node] < compiled.shared_bytes] = NEVER
        if compiled.compute is not None:
            gains[self.fleet.compute[node] < compiled.compute[self.fleet.class_numbers[node]]] = NEVER
        return gains

    def _spread(self, gains: Table, nodes: Nodes) -> Table:
        """The emptiest device first; the price of a cell only breaks ties."""
        fleet, (_, deep, wide) = self.fleet, self.fleet.shape
        free = fleet.free[nodes].reshape(len(nodes), deep, wide).sum(axis=2)
        emptiness = free * STEPS // fleet.device_bytes[nodes] * (UNIT // (2 * STEPS)) - fleet.tenants[nodes] * UNIT
        spread: Table = np.where(gains > _HARDLY, gains // _TIE + np.repeat(emptiness, wide, axis=1), NEVER)
        return spread

    def _affinity_cells(self, compiled: CompiledAsk) -> npt.NDArray[np.bool_]:
        """Cells that the ask's affinity and its named partition allow."""
        fleet, ask = self.fleet, compiled.need.ask
        allowed = np.ones(fleet.shape[:2], dtype=bool)
        for deployment in sorted(ask.with_deployments):
            there = np.zeros(fleet.shape[:2], dtype=bool)
            for at, count in fleet.where.get(deployment, {}).items():
                there[at] = count > 0
            allowed &= there
        for deployment in sorted(compiled.need.avoided):
            for at, count in fleet.where.get(deployment, {}).items():
                if count > 0:
                    allowed[at] = False
        cells = np.repeat(allowed, fleet.shape[2], axis=1)
        if ask.partition_id is not None:
            named = np.zeros(cells.shape, dtype=bool)
            for at in fleet.cells.get(ask.partition_id, ()):
                named[at] = True
            cells &= named
        return cells

    def _first_cells_on(self, compiled: CompiledAsk, node: int) -> tuple[int, ...]:
        _, deep, wide = self.fleet.shape
        fits = np.asarray(self._gains_on(compiled, node) > _HARDLY).reshape(deep, wide)
        places = np.flatnonzero(fits.any(axis=1))[: compiled.count].tolist()
        return tuple(place * wide + int(fits[place].argmax()) for place in places)

    def _cells_on(self, compiled: CompiledAsk, node: int) -> tuple[int, ...]:
        if not compiled.count:
            return ()
        gains = self._rated_on(compiled, node)
        if compiled.count == 1:
            return (int(gains.argmax()),)
        _, deep, wide = self.fleet.shape
        cells = gains.reshape(deep, wide)
        order = np.argsort(-cells.max(axis=1), kind="stable")[: compiled.count]
        return tuple(place * wide + int(cells[place].argmax()) for place in sorted(order.tolist()))
