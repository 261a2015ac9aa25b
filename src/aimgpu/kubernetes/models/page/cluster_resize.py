"""Looks at a cluster once, and carries a ShareRollout out."""

import asyncio
from typing import Any

from aimgpu.errors import ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.models.page.observed import ClusterObjects
from aimgpu.kubernetes.models.page.share_rollout import ShareRollout
from aimgpu.kubernetes.models.serving.applier import StackApplier
from aimgpu.kubernetes.models.serving.manifests import Manifest
from aimgpu.kubernetes.models.serving.share_rewrite import (
    is_rolled_out,
    read_source,
    restore_strategy,
    rewrite_share,
    strategy_of,
)
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES
from aimgpu.kubernetes.vocabulary.model_labels import SERVED_MODEL

_FORBIDDEN = 403
_LOOK_SECONDS = 2.0
_LONGEST_SECONDS = 3600.0

Strategy = dict[str, Any] | None  # how pods are replaced; None: as KServe does it


async def read_cluster(client: Client, namespace: str) -> ClusterObjects:
    """The models of one namespace and every GPU; no GPU where these rights do not show all that is held of them."""
    models, _ = await client.list(DEPLOYMENTS, namespace, labels=SERVED_MODEL)
    pods, _ = await client.list(PODS, namespace, labels=SERVED_MODEL)
    try:
        nodes, _ = await client.list(GPU_NODES)
        shares, _ = await client.list(GPU_SHARES)
    except NotFoundInCluster:
        return ClusterObjects(models=models, pods=pods)
    except ClusterFailed as error:
        if error.status != _FORBIDDEN:
            raise
        return ClusterObjects(models=models, pods=pods)
    return ClusterObjects(nodes=nodes, shares=shares, models=models, pods=pods)


async def apply_rollout(client: Client, deployment: Object, rollout: ShareRollout) -> Strategy:
    """Returns how its pods were replaced until now. Raises ClusterFailed, or NotAllowed where aimgpu did not apply it."""
    source = await read_source(client, deployment)
    await _apply(client, deployment, rewrite_share(source, rollout.wanted, surge=rollout.surge))
    return strategy_of(source)


async def finish_rollout(client: Client, deployment: Object, before: Strategy) -> None:
    """After its pods are replaced: one that starts new pods first would wait for ever on a GPU without room for both."""
    source = await read_source(client, deployment)
    await _apply(client, deployment, restore_strategy(source, before))


async def wait_for_rollout(client: Client, deployment: Object, rollout: ShareRollout) -> None:
    """Until every pod has the new share and answers. Raises TimeoutError."""
    metadata = deployment["metadata"]
    async with asyncio.timeout(_LONGEST_SECONDS):
        while True:
            if is_rolled_out(await client.get(DEPLOYMENTS, metadata["name"], metadata["namespace"]), rollout.wanted):
                return
            await asyncio.sleep(_LOOK_SECONDS)


async def _apply(client: Client, deployment: Object, manifest: Manifest) -> None:
    async for _ in StackApplier(client, deployment["metadata"]["namespace"]).apply([manifest]):
        pass
