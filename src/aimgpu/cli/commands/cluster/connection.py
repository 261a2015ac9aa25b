"""The connection of a command to its cluster."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.kubernetes.api.access import read_access
from aimgpu.kubernetes.api.client import Client

_Answer = TypeVar("_Answer")


@asynccontextmanager
async def connected(target: ClusterTarget) -> AsyncIterator[tuple[Client, str]]:
    """The client and the namespace. Raises ClusterFailed where no cluster is configured."""
    access = read_access(kubeconfig=target.kubeconfig, context=target.context)
    async with Client(access) as client:
        yield client, target.namespace or client.namespace or "default"


def in_cluster(target: ClusterTarget, work: Callable[[Client, str], Awaitable[_Answer]]) -> _Answer:
    """Run `work` with the cluster's client and namespace."""

    async def run() -> _Answer:
        async with connected(target) as (client, namespace):
            return await work(client, namespace)

    return asyncio.run(run())
