"""The cluster in the engine's arrays, kept by what mirrors report, and a node for each pod that waits. Pure.

Three things take room: a pod its node's CPU and the like, an allocated claim its cells, and a pod that was sent to a node the
cells that it will probably get there, until its claim is allocated. Where a guess was wrong, the allocation replaces it.
kube-scheduler gives a pod the first devices of a node that do, so those are the guess.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aimgpu.domain import Ask, Auto
from aimgpu.kubernetes.api.mirror import Key
from aimgpu.kubernetes.cluster.placer.gpus import (
    ClaimView,
    GpuAsk,
    NoHint,
    Published,
    product_names,
    read_asks,
    read_limit,
)
from aimgpu.kubernetes.cluster.placer.pods import PodView
from aimgpu.kubernetes.cluster.placer.rules import (
    CPU,
    MEMORY,
    NodeFacts,
    NodeRules,
    Port,
    ports_conflict,
    read_rules,
    unread_rule,
)
from aimgpu.placement import NodeState, Snapshot
from aimgpu.placement.scoring.chooser import Chooser
from aimgpu.placement.scoring.fleet import Charge, Fleet
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.placement.scoring.weights import COMING_AND_GOING, Weights
from aimgpu.units import PPM

_FEW = 16  # pods that come before prices are made again; later a quarter of those that are there
_MOST_READ = 4096  # claims and limits that are kept as they were read


@dataclass(frozen=True, slots=True, kw_only=True)
class PodChoice:
    """For one pod: a node; or why it waits; or why it is left to kube-scheduler."""

    node: str = ""
    waits: str = ""
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class _Taken:
    """By one pod of its node, beside cells."""

    charge: Charge
    others: Mapping[str, int]
    ports: frozenset[Port]


class ClusterFleet:
    """Fed with views of nodes, slices, claims and pods in any order; then `choose` for one pod at a time."""

    def __init__(self, weights: Weights = COMING_AND_GOING) -> None:
        self._weights = weights
        self.freed = 0  # grows whenever a pod that found no node may find one
        self._nodes: dict[str, NodeFacts] = {}
        self._published = Published()
        self._claims: dict[Key, ClaimView] = {}
        self._pods: dict[Key, PodView] = {}
        self._waiting: dict[Key, PodView] = {}  # of these
        self._sent: dict[Key, str] = {}  # pods whose gate is being removed, by the node that was chosen
        self._guessed: dict[Key, Charge] = {}  # cells, by pod
        self._taken: dict[Key, _Taken] = {}  # by pod
        self._allocated: dict[Key, list[Charge]] = {}  # cells, by claim
        self._short: dict[tuple[int, int], dict[Key, int]] = {}  # bytes of claims that wrong guesses left no room for, by cell
        self._users: dict[Key, Key] = {}  # pod by claim, while cells are guessed
        self._free: dict[str, npt.NDArray[np.int64]] = {}  # beside CPU and memory, by resource and node
        self._ports: dict[int, dict[Port, int]] = {}
        self._products: set[str] = set()
        self._stale, self._new = True, 0
        self._made: tuple[Fleet, Chooser] | None = None
        self._allowed: dict[str, npt.NDArray[np.bool_]] = {}
        self._failed: dict[object, int] = {}  # what found no node, and from how much host memory on
        self._asks: dict[object, Ask] = {}
        self._read: dict[str, tuple[GpuAsk, ...] | NoHint] = {}

    def put_node(self, name: str, node: NodeFacts | None) -> None:
        """None: it is gone."""
        before = self._nodes.pop(name, None)
        if node is not None:
            self._nodes[name] = node
        if before == node:
            return
        if before is None or node is None or before.allocatable != node.allocatable:
            self._stale = True
        self._allowed.clear()
        self._try_again()

    def put_slice(self, name: str, spec: Mapping[str, Any] | None) -> None:
        if self._published.put(name, spec):
            self._stale = True
            self._try_again()

    def put_claim(self, key: Key, claim: ClaimView | None) -> None:
        before = self._claims.pop(key, None)
        if claim is not None:
            self._claims[key] = claim
        if claim is not None and claim.allocated and (pod := self._users.pop(key, None)) is not None:
            self._drop_guess(pod, claim)
        if (before.taken if before else ()) != (claim.taken if claim else ()):
            self._charge_claim(key, claim)

    def put_pod(self, key: Key, pod: PodView | None) -> None:
        known = self._pods.pop(key, None)
        self._waiting.pop(key, None)
        if pod is not None:
            self._pods[key] = pod
            if pod.waiting:
                self._waiting[key] = pod
        self._new += known is None
        if pod is not None and pod.waiting and key in self._sent and known is not None and known.uid == pod.uid:
            return  # an older state than what we wrote
        self._sent.pop(key, None)
        self._charge_pod(key, pod, pod.place if pod else "")
        if pod is None or not pod.place:
            self._drop_guess(key)
        elif key in self._guessed:
            self._await_claims(key, pod)

    def waiting(self) -> list[PodView]:
        """Those with our gate alone that were not sent anywhere yet, in their order."""
        return sorted((pod for key, pod in self._waiting.items() if key not in self._sent), key=lambda pod: pod.order)

    def waits(self, pod: PodView) -> bool:
        """As it was when it was listed."""
        return self._waiting.get(pod.key) is pod and pod.key not in self._sent

    def choose(self, pod: PodView, volumes: Sequence[Sequence[Mapping[str, Any]]] = ()) -> PodChoice | None:
        """The room is taken at once; `forget` gives it back. None: its claims are not there yet."""
        spec = pod.waiting["spec"]
        if (rule := unread_rule(spec)) is not None:
            return PodChoice(skipped=rule)
        try:
            gpus = self._gpus_of(pod, waiting=True)
        except NoHint as reason:
            return PodChoice(skipped=str(reason))
        if gpus is None:
            return None
        fleet, chooser = self._engine()
        rules = read_rules(spec, volumes)
        limits = self._claimed_limits(pod)
        others = {name: count for name, count in pod.requests.items() if name not in (CPU, MEMORY) and name not in limits}
        host = pod.requests.get(MEMORY, 0)
        allowed = self._allowed_by(rules)
        for ask in self._asks_for(pod, gpus):
            kind = chooser.compiled_for(ask)
            again = (kind, rules.key, tuple(sorted(others.items())), pod.ports)
            if self._failed.get(again, host + 1) <= host:
                continue
            node = chooser.choose(kind, host, self._with_room(fleet, allowed, others, pod.ports))
            if node is not None:
                charge = chooser.charge_for(kind, node, ask, host, first=True)
                return self._send(pod, fleet.nodes[node].name, charge)
            self._failed[again] = min(host, self._failed.get(again, host))
        named = f"{int(allowed.sum())} of {len(fleet.nodes)} nodes match its selectors and tolerations"
        return PodChoice(waits=f"no node has room for it now; {named}")

    def leave(self, key: Key) -> None:
        """It is being let go without a hint."""
        self._sent[key] = ""

    def forget(self, key: Key) -> None:
        """What was chosen for the pod could not be written, or does not hold any more."""
        self._sent.pop(key, None)
        self._drop_guess(key)
        self._charge_pod(key, None, "")

    def _send(self, pod: PodView, node: str, charge: Charge) -> PodChoice:
        _, chooser = self._engine()
        self._sent[pod.key] = node
        self._charge_pod(pod.key, pod, node)
        if charge.cells:
            guess = charge._replace(cpu_millis=0, host_memory_bytes=0, deployment="")
            chooser.take(guess)
            self._guessed[pod.key] = guess
            self._await_claims(pod.key, pod)
        return PodChoice(node=node)

    def _await_claims(self, key: Key, pod: PodView) -> None:
        """The guess of a pod's cells ends with the allocation of its claim, which kube-scheduler may make itself."""
        for name in pod.claims:
            claim = self._claims.get((key[0], name))
            if claim is not None and claim.allocated:
                self._drop_guess(key, claim)
                return
            self._users[key[0], name] = key

    def _drop_guess(self, key: Key, claim: ClaimView | None = None) -> None:
        """`claim`: what it was a guess of; on the same node nothing has come free."""
        charge = self._guessed.pop(key, None)
        if charge is not None and self._made is not None:
            fleet, chooser = self._made
            chooser.release(charge)
            self._make_up(charge)
            if claim is None or any(pool != fleet.nodes[charge.node].name for (pool, _), *_ in claim.taken):
                self._try_again()

    def _charge_pod(self, key: Key, pod: PodView | None, place: str) -> None:
        before = self._taken.pop(key, None)
        if self._made is None:
            return
        fleet, chooser = self._made
        node = fleet.index.get(place)
        if before is not None:
            chooser.release(before.charge)
            self._count(before, 1)
            if before.charge.node != node:
                self._try_again()
        if pod is None or node is None:
            return
        charge = Charge(node, (), (), (), pod.requests.get(CPU, 0), pod.requests.get(MEMORY, 0))
        chooser.take(charge)
        limits = self._claimed_limits(pod)
        others = {name: count for name, count in pod.requests.items() if name not in (CPU, MEMORY) and name not in limits}
        self._taken[key] = taken = _Taken(charge, others, pod.ports)
        self._count(taken, -1)

    def _charge_claim(self, key: Key, claim: ClaimView | None) -> None:
        if self._made is None:
            return
        fleet, chooser = self._made
        for charge in self._allocated.pop(key, ()):
            for at in ((charge.node, cell) for cell in charge.cells):
                self._short.get(at, {}).pop(key, None)
            chooser.release(charge)
            self._make_up(charge)
            self._try_again()
        for (pool, device), taken, percent in claim.taken if claim is not None else ():
            for at in fleet.cells.get(f"{pool}/{device}", ()):
                self._take_cell(key, at, int(fleet.capacity[at]) if taken is None else taken, percent * PPM // 100)

    def _take_cell(self, key: Key, at: tuple[int, int], wanted: int, compute_ppm: int = 0) -> None:
        """As much as guesses of other pods leave; the rest when they go."""
        fleet, chooser = self._engine()
        taken = min(wanted, max(int(fleet.free[at]), 0))
        compute = min(compute_ppm, max(int(fleet.compute[at]), 0))
        charge = Charge(at[0], (at[1],), (taken,), (compute,) if compute else ())
        chooser.take(charge)
        self._allocated.setdefault(key, []).append(charge)
        if wanted > taken:
            self._short.setdefault(at, {})[key] = wanted - taken

    def _make_up(self, released: Charge) -> None:
        for at in ((released.node, cell) for cell in released.cells):
            for key, missing in self._short.pop(at, {}).items():
                self._take_cell(key, at, missing)

    def _try_again(self) -> None:
        """Something may have come free."""
        self.freed += 1
        self._failed.clear()

    def _count(self, taken: _Taken, sign: int) -> None:
        node = taken.charge.node
        for name, amount in taken.others.items():
            if name in self._free:
                self._free[name][node] += sign * amount
        if taken.ports:
            used = self._ports[node]
            for port in taken.ports:
                used[port] = used.get(port, 0) - sign
                if not used[port]:
                    del used[port]

    def _engine(self) -> tuple[Fleet, Chooser]:
        if self._made is None or self._stale:
            return self._build()
        if self._new > max(_FEW, len(self._pods) // 4):
            fleet = self._made[0]
            self._made = fleet, self._new_chooser(fleet)
        return self._made

    def _build(self) -> tuple[Fleet, Chooser]:
        nodes = tuple(
            NodeState(
                name=node.name,
                devices=self._published.devices_of(node.name),
                cpu_millis=node.allocatable.get(CPU, 0),
                host_memory_bytes=node.allocatable.get(MEMORY, 0),
            )
            for node in self._nodes.values()
        )
        fleet = Fleet(Snapshot(nodes=nodes))
        self._products = {state.device.product for states in fleet.states for state in states}
        self._allowed.clear()
        self._asks.clear()
        self._free = {}
        for name in sorted({name for node in self._nodes.values() for name in node.allocatable} - {CPU, MEMORY}):
            amounts = [self._nodes[node.name].allocatable.get(name, 0) for node in fleet.nodes]
            self._free[name] = np.array(amounts, dtype=np.int64)
        self._ports = defaultdict(dict)
        made = self._made = fleet, self._new_chooser(fleet)
        self._stale = False
        self._taken.clear()
        self._allocated.clear()
        self._short.clear()
        for key, claim in self._claims.items():
            self._charge_claim(key, claim)
        for key, pod in self._pods.items():
            self._charge_pod(key, pod, self._sent.get(key) or pod.place)
        self._guessed.clear()  # where devices changed a guess says nothing; the next allocations do
        return made

    def _new_chooser(self, fleet: Fleet) -> Chooser:
        """Prices learned from all pods that are there."""
        self._new = 0
        self._try_again()
        asks, host = list[Ask](), 0
        for pod in self._pods.values():
            if pod.finished or pod.daemon:
                continue
            try:
                gpus = self._gpus_of(pod, waiting=False)
            except NoHint:
                continue
            if gpus is not None:
                asks.append(next(iter(self._asks_for(pod, gpus))))
                host += pod.requests.get(MEMORY, 0) if gpus else 0
        mix = Mix(counts=Mix.of(asks).counts, host_memory_bytes=host)
        return Chooser(fleet, Valuation(fleet, mix, self._weights))

    def _gpus_of(self, pod: PodView, *, waiting: bool) -> tuple[GpuAsk, ...] | None:
        """Alternatives; empty: it asks for no GPU; None: a claim of it is not there yet."""
        asked = (read_limit(name, pod.requests[name]) for name in self._claimed_limits(pod))
        found: list[tuple[GpuAsk, ...]] = [(ask,) for ask in asked if ask is not None]
        if pod.waiting and len(pod.waiting["spec"].get("resourceClaims") or ()) > len(pod.claims):
            return None
        for name in pod.claims:
            claim = self._claims.get((pod.key[0], name))
            if claim is None:
                return None
            if claim.allocated and waiting:
                raise NoHint("a claim that is allocated already")
            found.append(self._read_claim(claim.asked))
        if len(found) > 1 and waiting:
            raise NoHint("several claims")
        return found[0] if found else ()

    def _read_claim(self, asked: str) -> tuple[GpuAsk, ...]:
        known = self._read.get(asked)
        if known is None:
            if len(self._read) >= _MOST_READ:
                self._read.clear()
            try:
                known = read_asks(asked)
            except NoHint as reason:
                known = reason
            self._read[asked] = known
        if isinstance(known, NoHint):
            raise known
        return known

    def _claimed_limits(self, pod: PodView) -> set[str]:
        """Extended resources that kube-scheduler makes a claim for, where no device plugin offers them."""
        named = (name for name in pod.requests if "/" in name)
        return {name for name in named if read_limit(name, 1) is not None and name not in self._free}

    def _asks_for(self, pod: PodView, gpus: tuple[GpuAsk, ...]) -> Iterable[Ask]:
        cpu = pod.requests.get(CPU, 0)
        for gpu in gpus or (None,):
            known = self._asks.get((gpu, cpu))
            if known is None:
                if len(self._asks) >= _MOST_READ:
                    self._asks.clear()
                known = self._asks[gpu, cpu] = self._new_ask(gpu, cpu)
            yield known

    def _new_ask(self, gpu: GpuAsk | None, cpu_millis: int) -> Ask:
        if gpu is None:
            return Ask(name="", want=Auto(), footprint_bytes=0, devices=0, cpu_millis=cpu_millis)
        return Ask(
            name="",
            want=gpu.want,
            devices=gpu.devices,
            compute_ppm=gpu.compute_ppm,
            products=product_names(gpu, self._products),
            cpu_millis=cpu_millis,
        )

    def _allowed_by(self, rules: NodeRules) -> npt.NDArray[np.bool_]:
        fleet, _ = self._engine()
        known = self._allowed.get(rules.key)
        if known is None:
            if len(self._allowed) >= _MOST_READ:
                self._allowed.clear()
            known = np.array([rules.allow(self._nodes[node.name]) for node in fleet.nodes], dtype=bool)
            self._allowed[rules.key] = known
        return known

    def _with_room(
        self, fleet: Fleet, allowed: npt.NDArray[np.bool_], others: Mapping[str, int], ports: frozenset[Port]
    ) -> npt.NDArray[np.bool_] | None:
        """By what the engine does not know. None: all nodes."""
        found = allowed.copy()
        for name, amount in others.items():
            free = self._free.get(name)
            found &= free >= amount if free is not None else np.zeros(len(fleet.nodes), dtype=bool)
        if ports:
            for node, used in self._ports.items():
                if ports_conflict(ports, used):
                    found[node] = False
        return None if found.all() else found
