"""What our webhooks cost pods that do not ask for us, while no admission server runs, by what the API server looks at.

Four API servers on one etcd, each with a key space of its own and without controllers, in four states: no webhooks, ours for
labelled namespaces (and the pods' has no label), ours for all with the shortest condition there is (`false`), and ours for all
as they ship. Pods are created on all four in turns, so that each sees the same load of the machine, and every round the states
move on by one server. What a state adds is the median of the rounds' differences to the server without webhooks. What the
third adds is the price of any condition: the API server converts the pod for CEL before it looks at the expression.
"""

import asyncio
import math
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import HIGHEST_PRIORITY, Cluster
from tests.cluster.control_plane import ADDRESS
from tests.cluster.processes import Process
from tests.kubernetes.accounts import NAMESPACE
from tests.kubernetes.admission import SERVICE

from aimgpu.errors import AimGpuError, ClusterConflict
from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.api.resources import PODS
from aimgpu.kubernetes.cluster.admission.warning_policies import warning_policies
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, validating_configuration
from aimgpu.kubernetes.vocabulary.namespaces import AdmittedNamespaces
from benchmarks.kube_cluster.webhook import create_dry, fake_pod, percentile

ROUNDS = 16  # a multiple of the servers: each is in each state equally often
WARM_UP = 100
SETTLE_SECONDS = 3.0
CONFIDENCE = 0.95
STATES = ("absent", "labelled", "trivial", "down")
FIRST_PORT = 16443
_GROUP = "admissionregistration.k8s.io"
_PLURALS = {
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
Blocks = dict[str, list[list[float]]]  # of each state, one list per round


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    process: Process
    client: Client


async def measure_absence(cluster: Cluster, reviews: int) -> dict[str, Any]:
    """Dry creations, in which admission is most of the work, and real ones, which end in etcd."""
    cluster.process("kube-scheduler").stop()
    cluster.process("kube-controller-manager").stop()
    _prioritise_self()
    dry: Blocks = {state: [] for state in STATES}
    stored: Blocks = {state: [] for state in STATES}
    cpu: Blocks = {state: [] for state in STATES}
    count = max(2, reviews // ROUNDS)
    async with AsyncExitStack() as stack:
        started = [_start(cluster, number) for number in range(len(STATES))]
        servers = [await _connect(process, kubeconfig, stack) for process, kubeconfig in started]
        cluster.prioritise()
        for number in range(ROUNDS):
            placed = {state: servers[(number + place) % len(servers)] for place, state in enumerate(STATES)}
            for state, server in placed.items():
                await _configure(server.client, state)
            await asyncio.sleep(SETTLE_SECONDS)
            await _create_in_turns(placed, WARM_UP, _create_dry)
            before = {state: _cpu_milliseconds(server.process) for state, server in placed.items()}
            _append(dry, await _create_in_turns(placed, count, _create_dry))
            _append(cpu, {key: [(_cpu_milliseconds(placed[key].process) - before[key]) / count] for key in STATES})
            _append(stored, await _create_in_turns(placed, count, _create))
    return {
        "plain_pod_rounds": ROUNDS,
        "plain_pod_block": count,
        **_figures("plain_pod", dry),
        **_added("plain_pod", "api_server_cpu_ms", cpu),
        **{f"plain_pod_{state}_api_server_cpu_ms": round(_middle(cpu[state]), 3) for state in STATES},
        **_figures("stored_plain_pod", stored),
    }


def _start(cluster: Cluster, number: int) -> tuple[Process, Path]:
    """As the cluster's own, with another port and another part of etcd; with a kubeconfig for it."""
    words = Path(f"/proc/{cluster.process('kube-apiserver').pid}/cmdline").read_text().rstrip("\0").split("\0")
    name, port = f"plain-{number}", FIRST_PORT + number
    changed = {"secure-port": port, "etcd-prefix": f"/{name}", "cert-dir": cluster.folder / name}
    kept = [word for word in words if word.partition("=")[0].removeprefix("--") not in changed]
    process = cluster.start(name, [*kept, *(f"--{flag}={value}" for flag, value in changed.items())])
    admin = cluster.authority.issue(name, name, "system:masters")
    server = f"https://127.0.0.1:{cluster.forward(port, ADDRESS)}"
    return process, cluster.authority.kubeconfig(cluster.folder / f"{name}.kubeconfig", admin, server)


async def _connect(process: Process, kubeconfig: Path, stack: AsyncExitStack) -> ApiServer:
    """When it takes pods: the server makes the namespace itself, the account is a controller's."""
    client = await stack.enter_async_context(Client(read_kubeconfig(kubeconfig)))
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    while True:
        try:
            with suppress(ClusterConflict):
                await client.create(Resource(version="v1", plural="serviceaccounts", namespaced=True), account, "default")
            await _create_dry(client)
        except (AimGpuError, OSError):
            if not process.running:
                raise RuntimeError(f"an API server ended:\n{process.tail()}") from None
            await asyncio.sleep(0.5)
        else:
            return ApiServer(process=process, client=client)


async def _configure(client: Client, state: str) -> None:
    scope = AdmittedNamespaces.LABELLED if state == "labelled" else AdmittedNamespaces.ALL
    mutating = mutating_configuration(NAMESPACE, SERVICE, scope=scope)
    if state == "trivial":
        for webhook in mutating["webhooks"]:
            webhook["matchConditions"] = [{"name": "never", "expression": "false"}]
    wanted: list[Object] = [] if state == "absent" else [mutating, validating_configuration(NAMESPACE, SERVICE, scope=scope)]
    wanted += warning_policies() if state == "labelled" else []
    for kind, plural in _PLURALS.items():
        resource = Resource(group=_GROUP, version="v1", plural=plural)
        for item in (await client.list(resource))[0]:
            if "aim-gpu-sharing" in item["metadata"]["name"]:
                await client.delete(resource, item["metadata"]["name"])
        for item in wanted:
            if item["kind"] == kind:
                await client.create(resource, item)


async def _create_in_turns(
    placed: dict[str, ApiServer], count: int, create: Callable[[Client], Awaitable[float]]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {state: [] for state in placed}
    states = list(placed)
    for number in range(count):
        for place in range(len(states)):
            state = states[(number + place) % len(states)]
            found[state].append(await create(placed[state].client))
    return found


async def _create_dry(client: Client) -> float:
    return await create_dry(client, fake_pod("plain", annotated=False))


def _append(blocks: Blocks, found: dict[str, list[float]]) -> None:
    for state, values in found.items():
        blocks[state].append(values)


def _figures(name: str, blocks: Blocks) -> dict[str, Any]:
    times = {state: [one for block in found for one in block] for state, found in blocks.items()}
    return {
        **{f"{name}_{state}_p10_ms": round(percentile(found, 10), 3) for state, found in times.items()},
        **{f"{name}_{state}_p50_ms": round(statistics.median(found), 3) for state, found in times.items()},
        **{f"{name}_{state}_p99_ms": round(percentile(found, 99), 2) for state, found in times.items()},
        **_added(name, "ms", blocks),
    }


def _added(name: str, unit: str, blocks: Blocks) -> dict[str, list[float]]:
    """Lower end, median and upper end of what each configuration adds to a creation."""
    medians = {state: [statistics.median(block) for block in found] for state, found in blocks.items()}
    added = {
        state: [with_us - without for with_us, without in zip(found, medians["absent"], strict=True)]
        for state, found in medians.items()
        if state != "absent"
    }
    return {f"{name}_{state}_added_{unit}": [round(value, 3) for value in _interval(found)] for state, found in added.items()}


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the order statistics that hold the true one with this confidence, whatever the distribution."""
    ordered, outside, rank = sorted(values), 0.0, 0
    while True:  # values below the median are binomial with one half
        outside += 2 * math.comb(len(ordered), rank) / 2 ** len(ordered)
        if outside > 1 - CONFIDENCE:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], statistics.median(ordered), ordered[-1 - rank]


def _middle(blocks: Sequence[Sequence[float]]) -> float:
    return statistics.median(one for block in blocks for one in block)


async def _create(client: Client) -> float:
    """A pod that is stored and removed again; milliseconds of its creation."""
    begin = time.perf_counter()
    await client.request("POST", PODS.path("default"), body=fake_pod("plain", annotated=False))
    seconds = time.perf_counter() - begin
    await client.request("DELETE", f"{PODS.path('default')}/plain", body={"gracePeriodSeconds": 0})
    return seconds * 1000


def _prioritise_self() -> None:
    """As the cluster: a client that waits for a core would be measured as a slow API server."""
    os.setpriority(os.PRIO_PROCESS, 0, HIGHEST_PRIORITY)
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(HIGHEST_PRIORITY))


def _cpu_milliseconds(process: Process) -> float:
    """Of its threads, in nanoseconds as the scheduler counts them: a tick is as long as three creations."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e6
