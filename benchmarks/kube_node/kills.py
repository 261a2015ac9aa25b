"""kill -9 of the agent, the kubelet and containerd while pods with shares start and end, many rounds on a real cluster.

Three pods take a third of one GPU each. In every round one program is killed while they start and one while they end, each
program in turn: after a random number of claims was prepared or undone, and up to some milliseconds later. The claims that
had their CDI file at the kill are counted, which shows how the kills spread over the steps. Most of a round is waiting for the
kubelet and containerd to come back, so that the rounds can be divided over several clusters side by side.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, Self

from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.kubernetes.node_agent import NodeAgent, claim_template, gpu_pod, running_agent, share

VICTIMS = ("agent", "kubelet", "containerd")
GPU_BYTES = 206141652992
PODS = 3
WAIT_SECONDS = 900.0
SEED = 15
_JITTER_SECONDS = 0.06


@dataclass(slots=True)
class Kills:
    """What happened so far."""

    rounds: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    prepared_at_kill: Counter[str] = field(default_factory=Counter)
    double_grants: int = 0
    leaks: int = 0
    not_ready: int = 0  # rounds with a pod that did not start within WAIT_SECONDS
    recovery_seconds: list[float] = field(default_factory=list)  # from the creation of the pods to all of them ready

    def __add__(self, other: Self) -> "Kills":
        return Kills(
            rounds=self.rounds + other.rounds,
            killed=self.killed + other.killed,
            prepared_at_kill=self.prepared_at_kill + other.prepared_at_kill,
            double_grants=self.double_grants + other.double_grants,
            leaks=self.leaks + other.leaks,
            not_ready=self.not_ready + other.not_ready,
            recovery_seconds=self.recovery_seconds + other.recovery_seconds,
        )

    def figures(self) -> dict[str, Any]:
        slow = sorted(self.recovery_seconds)
        return {
            "kill_rounds": self.rounds,
            **{f"kills_{name}": self.killed[name] for name in VICTIMS},
            **{f"kills_{name}": count for name, count in sorted(self.prepared_at_kill.items())},
            "kill_double_grants": self.double_grants,
            "kill_leaks": self.leaks,
            "kill_rounds_not_ready": self.not_ready,
            "kill_all_ready_median_s": round(slow[len(slow) // 2], 1) if slow else None,
            "kill_all_ready_worst_s": round(slow[-1], 1) if slow else None,
        }


def measure_kills(rounds: int, seconds: float, clusters: int = 1) -> dict[str, Any]:
    """So many rounds, or as many as begin within the time; each cluster has its own part of them and its own dice."""
    parts = [rounds // clusters + (number < rounds % clusters) for number in range(clusters)]
    seeds = range(SEED, SEED + clusters)
    with ProcessPoolExecutor(clusters, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(_kill_on_one_cluster, parts, [seconds] * clusters, seeds))
    return sum(found, Kills()).figures() | {"kill_clusters": clusters}


def _kill_on_one_cluster(rounds: int, seconds: float, seed: int) -> Kills:
    kills, dice, begin = Kills(), random.Random(seed), time.monotonic()  # noqa: S311 - moments of kills
    with Cluster() as cluster, running_agent(cluster, "--simulated", "MI300X:1") as agent:
        cluster.apply(claim_template("third", share("60Gi", "33")))
        while kills.rounds < rounds and time.monotonic() - begin < seconds:
            _round(cluster, agent, kills, dice)
            print(f"seed {seed}: {kills.figures()}", file=sys.stderr, flush=True)
    return kills


def _round(cluster: Cluster, agent: NodeAgent, kills: Kills, dice: random.Random) -> None:
    pods = [f"pod-{kills.rounds}-{index}" for index in range(PODS)]
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as aside:
        applied = aside.submit(cluster.apply, [gpu_pod(name, "third") for name in pods])
        _kill_after(agent, kills, "starting", dice, lambda count: len(agent.cdi_files()) >= count)
        applied.result()
    if _all_ready(cluster, pods):
        kills.recovery_seconds.append(time.monotonic() - begin)
        kills.double_grants += _wrong(agent) or len(agent.grants()) != PODS
    else:
        kills.not_ready += 1
        kills.double_grants += _wrong(agent)
    with ThreadPoolExecutor(1) as aside:
        deleted = aside.submit(cluster.kubectl, "delete", "pod", *pods, "--grace-period=1", "--wait=false")
        _kill_after(agent, kills, "ending", dice, lambda count: len(agent.cdi_files()) <= PODS - count)
        deleted.result()
    for name in pods:
        cluster.wait(f"pod/{name}", "delete", timeout_seconds=WAIT_SECONDS)
    try:
        wait_until(lambda: not agent.cdi_files() and not agent.grants(), "everything given back", agent.check, WAIT_SECONDS)
    except TimeoutError:
        kills.leaks += 1
    kills.rounds += 1


def _all_ready(cluster: Cluster, pods: list[str]) -> bool:
    try:
        for name in pods:
            cluster.wait(f"pod/{name}", "condition=Ready", timeout_seconds=WAIT_SECONDS)
    except RuntimeError as error:
        print(error, cluster.kubectl("describe", "pods"), file=sys.stderr, flush=True)
        return False
    return True


def _kill_after(agent: NodeAgent, kills: Kills, phase: str, dice: random.Random, reached: Callable[[int], bool]) -> None:
    """`reached`: whether so many claims were prepared, or undone, since the phase began."""
    count, deadline = dice.randrange(PODS), time.monotonic() + WAIT_SECONDS
    while not reached(count) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(dice.uniform(0, _JITTER_SECONDS))
    victim = VICTIMS[sum(kills.killed.values()) % len(VICTIMS)]
    kills.killed[victim] += 1
    if victim == "agent":
        agent.kill()
        kills.prepared_at_kill[f"{phase}_{len(agent.cdi_files())}_prepared"] += 1
        agent.start(wait=False)
    else:
        kills.prepared_at_kill[f"{phase}_{len(agent.cdi_files())}_prepared"] += 1
        restart = agent.node.restart_kubelet if victim == "kubelet" else agent.node.restart_containerd
        restart(kill=True)
    kills.double_grants += _wrong(agent)


def _wrong(agent: NodeAgent) -> bool:
    """More than the GPU has, or one instance twice."""
    grants = agent.grants()
    same = len({grant["instance_id"] for grant in grants}) != len(grants)
    return same or sum(grant["memory_bytes"] for grant in grants) > GPU_BYTES
