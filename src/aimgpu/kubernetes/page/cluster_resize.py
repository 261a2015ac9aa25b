"""Looks at a cluster once, and carries a ShareRollout out."""

from aimgpu.errors import ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.custom_resources import GPU_NODES, GPU_SHARES
from aimgpu.kubernetes.page.observed import ClusterObjects
from aimgpu.kubernetes.page.share_rollout import ShareRollout
from aimgpu.kubernetes.serving.applier import StackApplier
from aimgpu.kubernetes.serving.model_labels import SERVED_MODEL
from aimgpu.kubernetes.serving.share_rewrite import read_source, rewrite_share
from aimgpu.kubernetes.standard_resources import DEPLOYMENTS, PODS

_FORBIDDEN = 403


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


async def apply_rollout(client: Client, deployment: Object, rollout: ShareRollout) -> None:
    """Raises ClusterFailed with what was refused and why, NotAllowed where aimgpu did not apply it."""
    source = await read_source(client, deployment)
    manifest = rewrite_share(source, rollout.wanted, surge=rollout.surge)
    async for _ in StackApplier(client, deployment["metadata"]["namespace"]).apply([manifest]):
        pass
