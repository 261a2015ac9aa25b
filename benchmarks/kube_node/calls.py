"""The node agent under the kubelet's own calls, on a real cluster: NodePrepareResources and NodeUnprepareResources by gRPC.

Whole pods are limited by the kubelet, containerd and runc; this is the agent's own part. The kubelet of the node is stopped, so
that pods which kube-scheduler placed there stay without containers, and the benchmark takes its place on the driver's socket:
it prepares and unprepares their claims, several at once as the kubelet does for several pods. The agent reads every claim from
the API server, charges its ledger, writes the CDI file and, beside it, the claim's status.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.kubernetes.node_agent import NodeAgent, gpu_pod

from aimgpu.kubernetes.node.kubelet_api import dra_v1_pb2 as pb
from aimgpu.kubernetes.vocabulary.names import DRIVER

SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
SOCKET = f"/var/lib/kubelet/plugins/{DRIVER}/dra.sock"
CALL_SECONDS = 60.0
WAIT_SECONDS = 120.0
Call = Callable[[pb.Claim], Awaitable[float]]  # its milliseconds


def measure_calls(cluster: Cluster, agent: NodeAgent, claims: int, seconds: float, at_once: int) -> dict[str, float]:
    """`claims` are prepared and unprepared in turns for so long, `at_once` of them at a time."""
    agent.node.process("kubelet").stop()
    pods = [f"called-{number}" for number in range(claims)]
    cluster.apply([gpu_pod(name, "share") for name in pods])
    allocated = _wait_for_claims(cluster, claims)
    before = _cpu_seconds(agent)
    figures = asyncio.run(_turns(agent, allocated, seconds, at_once))
    pairs = figures["agent_pairs"]
    wait_until(lambda: not agent.cdi_files() and not agent.grants(), "everything given back", agent.check, WAIT_SECONDS)
    return figures | {"agent_cpu_ms_per_pair": round(1000 * (_cpu_seconds(agent) - before) / pairs, 1)}


def _wait_for_claims(cluster: Cluster, count: int) -> list[pb.Claim]:
    found: list[dict[str, Any]] = []

    def all_reserved() -> bool:
        found[:] = cluster.get_all("resourceclaims")
        return sum(bool((claim.get("status") or {}).get("reservedFor")) for claim in found) >= count

    wait_until(all_reserved, f"{count} claims allocated and reserved by kube-scheduler", lambda: None, WAIT_SECONDS)
    return [
        pb.Claim(namespace="default", uid=claim["metadata"]["uid"], name=claim["metadata"]["name"])
        for claim in found
        if (claim.get("status") or {}).get("reservedFor")
    ]


async def _turns(agent: NodeAgent, claims: list[pb.Claim], seconds: float, at_once: int) -> dict[str, float]:
    prepares: list[float] = []
    unprepares: list[float] = []
    rss: list[int] = []
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel(f"unix://{agent.node.path(SOCKET)}", options=options) as channel:
        prepare, unprepare = _calls(channel)
        begin = time.monotonic()

        async def one(own: list[pb.Claim]) -> None:
            """As one pod after another: a claim is unprepared only after it was prepared."""
            while time.monotonic() - begin < seconds:
                prepares.extend([await prepare(claim) for claim in own])
                rss.append(read_rss_mb(agent))
                unprepares.extend([await unprepare(claim) for claim in own])

        await asyncio.gather(*(one(claims[number::at_once]) for number in range(at_once)))
        taken = time.monotonic() - begin
    return {
        "agent_claims": len(claims),
        "agent_pairs": len(unprepares),
        "agent_pairs_per_minute": round(60 * len(unprepares) / taken),
        "agent_prepare_p50_ms": round(statistics.median(prepares), 1),
        "agent_prepare_p99_ms": round(statistics.quantiles(prepares, n=100)[98], 1),
        "agent_unprepare_p50_ms": round(statistics.median(unprepares), 1),
        "agent_unprepare_p99_ms": round(statistics.quantiles(unprepares, n=100)[98], 1),
        "agent_called_rss_mb": max(rss),
    }


def _calls(channel: grpc.aio.Channel) -> tuple[Call, Call]:
    ask_prepare = channel.unary_unary(
        f"/{SERVICE}/NodePrepareResources",
        request_serializer=pb.NodePrepareResourcesRequest.SerializeToString,
        response_deserializer=pb.NodePrepareResourcesResponse.FromString,
    )
    ask_unprepare = channel.unary_unary(
        f"/{SERVICE}/NodeUnprepareResources",
        request_serializer=pb.NodeUnprepareResourcesRequest.SerializeToString,
        response_deserializer=pb.NodeUnprepareResourcesResponse.FromString,
    )

    async def prepare(claim: pb.Claim) -> float:
        begin = time.perf_counter()
        answer = (await ask_prepare(pb.NodePrepareResourcesRequest(claims=[claim]), timeout=CALL_SECONDS)).claims[claim.uid]
        if answer.error or not answer.devices:
            raise RuntimeError(f"{claim.name} was not prepared: {answer.error}")
        return 1000 * (time.perf_counter() - begin)

    async def unprepare(claim: pb.Claim) -> float:
        begin = time.perf_counter()
        answer = await ask_unprepare(pb.NodeUnprepareResourcesRequest(claims=[claim]), timeout=CALL_SECONDS)
        if answer.claims[claim.uid].error:
            raise RuntimeError(f"{claim.name} was not unprepared: {answer.claims[claim.uid].error}")
        return 1000 * (time.perf_counter() - begin)

    return prepare, unprepare


def read_rss_mb(agent: NodeAgent) -> int:
    """Resident memory of the agent."""
    if agent.process is None:
        return 0
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def _cpu_seconds(agent: NodeAgent) -> float:
    if agent.process is None:
        return 0.0
    fields = Path(f"/proc/{agent.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
