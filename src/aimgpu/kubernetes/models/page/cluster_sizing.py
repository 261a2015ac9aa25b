"""What a model would need on this cluster, and the cluster as placement sees it: for answers before anything is applied.

kube-scheduler decides in the end. It goes by the same shares and the same sizes, but may choose another GPU.
"""

import contextlib
from collections.abc import Iterator

from aimgpu.control.observation import Observation
from aimgpu.control.plan.prepared import Prepared, ask_for
from aimgpu.domain import Ask, Auto, Deployment, Exactness, Footprint, Level, Memory, Term, Vendor
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.kubernetes.models.serving.manifests import DEFAULT_ENGINE
from aimgpu.kubernetes.vocabulary.served_model import PodModel, size_model
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.sizing import built_in

_LEVELS = frozenset(Level)  # what a node can enforce is not in the objects; admission refuses what it cannot


def size_in_cluster(deployment: Deployment, seen: Observation) -> Prepared:
    """As admission sizes its pods. Raises InvalidInput for an unknown model whose memory is not given."""
    engine = deployment.engine or DEFAULT_ENGINE
    vendor = Vendor.AMD if any(device.vendor is Vendor.AMD for device in seen.devices) else Vendor.NVIDIA
    model = PodModel(
        name=deployment.model,
        context_tokens=deployment.context_tokens,
        sequences=deployment.concurrency,
        concurrency=deployment.concurrency or 1,
        tensor_parallel=deployment.ask.device_count,
        is_vllm=engine == "vllm",
    )
    try:
        footprint = size_model(model, built_in(), vendor)
    except InvalidInput:
        if isinstance(deployment.ask.want, Auto):
            raise
        footprint = _asked(deployment, engine)
    return Prepared(deployment=deployment, engine=engine, footprint=footprint)


def _asked(deployment: Deployment, engine: str) -> Footprint:
    """An unknown model has what was asked for it."""
    want = deployment.ask.want
    size = want.memory_bytes if isinstance(want, Memory) else 0
    term = Term(name="asked", memory_bytes=size, exactness=Exactness.EXACT, formula="as asked for")
    return Footprint(
        model=deployment.model,
        engine=engine,
        precision=deployment.precision or "unknown",
        context_tokens=deployment.context_tokens or 0,
        concurrency=deployment.concurrency or 1,
        terms=(term,),
        notes=("Nothing is known about this model, so what it needs was not computed.",),
    )


def snapshot_of(seen: Observation) -> Snapshot:
    """A snapshot to plan on without moves and stops, which kube-scheduler decides."""
    grants = [grant for instance in seen.instances for grant in instance.grants]
    nodes: dict[str, list[DeviceState]] = {}
    for device in seen.devices:
        node = device.id.partition("/")[0]
        mine = tuple(grant for grant in grants if grant.device_id == device.id)
        levels = {part.id: _LEVELS for part in device.layout.partitions}
        state = DeviceState(
            device=device,
            grants=mine,
            foreign_bytes=seen.foreign_bytes.get(device.id, {}),
            foreign_kind="pods",
            shared_levels=levels,
            exclusive_levels=levels,
        )
        nodes.setdefault(node, []).append(state)
    states = tuple(NodeState(name=name, devices=tuple(found)) for name, found in nodes.items())
    return Snapshot(nodes=states, running=dict(_running(seen)))


def _running(seen: Observation) -> Iterator[tuple[str, Ask]]:
    """What each instance that holds something would ask for again, if known."""
    wanted = {one.name: one for one in seen.deployments}
    for instance in seen.instances:
        if instance.grants and instance.deployment in wanted:
            with contextlib.suppress(AimGpuError):
                yield instance.id, ask_for(size_in_cluster(wanted[instance.deployment], seen), instance.replica)
