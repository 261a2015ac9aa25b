"""What keeps kube-scheduler from placing pods quickly in this cluster, and what to change."""

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api_client import Client
from aimgpu.kubernetes.names import DRIVER
from aimgpu.kubernetes.standard_resources import RESOURCE_SLICES

_FAST_COUNTERS_FROM = (1, 37)  # kubernetes/kubernetes#138917
_MANY_NODES = 100  # about 30 ms of kube-scheduler's CPU per pod, by the growth from 500 to 1,000 nodes; 2.2 s at 500

_ADVICE = (
    "While no pod holds a share, install the chart with agent.singleDevice=true and agent.repartition=false, "
    "or upgrade to Kubernetes 1.37"
)


async def describe_slow_scheduling(client: Client) -> list[str]:
    """One note where slices with counters of many nodes slow kube-scheduler down; none for who may not list slices."""
    try:
        slices, _ = await client.list(RESOURCE_SLICES, fields=f"spec.driver={DRIVER}")
    except ClusterFailed:  # not allowed, or a server without resource claims
        return []
    nodes = {str(one["spec"].get("nodeName")) for one in slices if one["spec"].get("sharedCounters")}
    if len(nodes) <= _MANY_NODES:
        return []
    major, minor, _ = await client.version()
    if (major, minor) >= _FAST_COUNTERS_FROM:
        return []
    found = (
        f"{len(nodes)} nodes offer their GPUs with counters, which slows kube-scheduler {major}.{minor} down with every node"
    )
    return [f"{found}. {_ADVICE}"]
