"""What keeps schedulers from placing pods, or from placing them quickly, in this cluster, and what to change."""

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import DEVICE_CLASSES, RESOURCE_SLICES
from aimgpu.kubernetes.vocabulary.names import CLASSES, DRIVER

_FAST_COUNTERS_FROM = (1, 37)  # kubernetes/kubernetes#138917
_MANY_NODES = 100  # about 30 ms of kube-scheduler's CPU per pod, by the growth from 500 to 1,000 nodes; 2.2 s at 500

_ADVICE = (
    "While no pod holds a share, install the chart with agent.singleDevice=true and agent.repartition=false, "
    "or upgrade to Kubernetes 1.37"
)


async def describe_missing_classes(client: Client) -> list[str]:
    """One note where GPUs are published and a DeviceClass is not there: claims of it wait, and not every scheduler says so."""
    try:
        if not (await client.list(RESOURCE_SLICES, fields=f"spec.driver={DRIVER}"))[0]:
            return []
        there = {item["metadata"]["name"] for item in (await client.list(DEVICE_CLASSES))[0]}
    except ClusterFailed:  # not allowed, or a server without resource claims
        return []
    missing = [name for name in CLASSES if name not in there]
    if not missing:
        return []
    return [f"no DeviceClass {', '.join(missing)}: pods whose claims name it are never placed. Install the chart again"]


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
