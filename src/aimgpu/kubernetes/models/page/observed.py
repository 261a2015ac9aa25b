"""What a cluster's objects show of GPUs and models, as the page reads it. Pure."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Device,
    Grant,
    Instance,
    InstanceState,
    Layout,
    Level,
    Partition,
    Vendor,
)
from aimgpu.errors import AimGpuError, UnknownProduct
from aimgpu.hardware.simulated.layouts import LayoutBook
from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.api.foreign_objects import leaving_out
from aimgpu.kubernetes.models.gateway.served_models import ClusterModel, read_model
from aimgpu.kubernetes.models.page.measured import NodeMeasures, tenants_of
from aimgpu.kubernetes.models.serving.model_status import describe_models, granted_bytes
from aimgpu.kubernetes.vocabulary import model_labels as labels

_GB = 10**9
_LONGEST_ENTRY = 64 * 1024
_REST = "rest"  # what no workload has a share of; how it is divided is not in the objects


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterObjects:
    """As the API server has them, and what the node agents measured."""

    nodes: Sequence[Object] = ()  # GpuNodes
    shares: Sequence[Object] = ()  # GpuShares
    models: Sequence[Object] = ()  # Deployments that serve a model
    pods: Sequence[Object] = ()  # theirs
    measured: NodeMeasures = field(default_factory=NodeMeasures)  # by the node agents
    one_namespace: bool = False  # shares, models and pods of others are not seen


def observe(objects: ClusterObjects, *, cluster: str, taken_at: float) -> Observation:
    """Every GPU and every served model of the cluster."""
    named, deployments, instances = list(name_models(objects.models)), [], []
    for name, item in named:
        with leaving_out(item):
            deployments.append(_deployment(name, item))
            instances += list(_instances(name, item, objects))
    return Observation(
        taken_at=taken_at,
        node=cluster,
        devices=tuple(_devices(objects)),
        usage=objects.measured.usage,
        tenants=tenants_of(objects.measured, objects.shares),
        foreign_bytes=_held_by_others(objects),
        deployments=tuple(deployments),
        instances=tuple(instances),
        lost=_unhealthy(objects.nodes),
    )


def name_models(models: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Names to show: short if only one namespace has it, else `namespace/name`, which the gateway always knows."""
    read: list[tuple[ClusterModel, Object]] = []
    for item in models:
        with leaving_out(item):
            read.append((read_model(item), item))
    whole: dict[str, tuple[ClusterModel, Object]] = {}
    for model, item in sorted(read, key=lambda one: one[0].key):
        whole.setdefault(f"{model.key[0]}/{model.name}", (model, item))
    count = Counter(model.name for model, _ in whole.values())
    for name, (model, item) in whole.items():
        yield model.name if count[model.name] == 1 else name, item


def _deployment(name: str, item: Object) -> Deployment:
    """As it was applied; what may have changed since is in annotations of its own."""
    model = read_model(item)
    wanted = _read_entry(name, item) or Deployment(
        name=name,
        model=model.model,
        ask=Ask(name=name, want=Auto(), deployment=name),
        engine=model.engine,
        context_tokens=model.context_tokens,
        concurrency=model.slots,
    )
    return replace(
        wanted,
        ask=replace(wanted.ask, priority=model.priority),
        objective=model.objective,
        replicas=model.wanted_replicas,
        keep_seconds=None if model.keep_seconds is None else int(model.keep_seconds),
    )


def _read_entry(name: str, item: Object) -> Deployment | None:
    text = (item["metadata"].get("annotations") or {}).get(labels.ENTRY)
    if text is None or len(text) > _LONGEST_ENTRY:
        return None
    try:
        (found,) = parse_stack(json.dumps({"models": {"entry": json.loads(text)}})).deployments
    except (ValueError, RecursionError, AimGpuError):  # written by hand, or by another version
        return None
    return replace(found, name=name, ask=replace(found.ask, name=name, deployment=name))


def _instances(name: str, item: Object, objects: ClusterObjects) -> Iterator[Instance]:
    """One for each pod; a model without pods has one that gives the reason."""
    model, namespace = read_model(item), item["metadata"]["namespace"]
    pods = [pod for pod in objects.pods if pod["metadata"]["namespace"] == namespace]
    shares = [share for share in objects.shares if share["metadata"]["namespace"] == namespace]
    for number, row in enumerate(describe_models([item], pods, shares)):
        state = InstanceState(row["state"])
        yield Instance(
            id=row["id"] or name,
            deployment=name,
            replica=number,
            model=model.model,
            engine=model.engine or "engine",
            launcher="pod",
            state=state,
            reason=row["reason"],
            grants=tuple(_grants(name, row, model)),
        )


def _grants(name: str, row: Mapping[str, Any], model: ClusterModel) -> Iterator[Grant]:
    node, gpu = row.get("node"), row.get("gpu")
    if not node or not gpu:
        return
    yield Grant(
        id=f"{row['id']}/{gpu}",
        instance_id=row["id"],
        deployment=name,
        node=node,
        device_id=f"{node}/{gpu}",
        partition_id=f"{node}/{row.get('partition') or gpu}",
        memory_bytes=row.get("memory_bytes") or 0,
        compute_ppm=None,
        priority=model.priority,
        level=_level(row.get("level")),
    )


def _level(name: object) -> Level:
    return next((one for one in Level if one.value == name), Level.NONE)


def _devices(objects: ClusterObjects) -> Iterator[Device]:
    partitions = _partitions_in_use(objects.shares)
    number = 0
    for node in sorted(objects.nodes, key=lambda one: str(one["metadata"]["name"])):
        name = str(node["metadata"]["name"])
        for gpu in _gpus_of(node):
            with leaving_out(node):
                yield _device(name, gpu, number, partitions.get((name, str(gpu["id"])), {}))
            number += 1


def _device(node: str, gpu: Mapping[str, Any], number: int, in_use: Mapping[str, int]) -> Device:
    device_id, size = f"{node}/{gpu['id']}", int(gpu.get("memoryBytes") or 0)
    name = str(gpu.get("layout") or "unknown")
    known = _known_layouts(device_id, gpu)
    layout = next((one for one in known if one.name == name), None)
    return Device(
        id=device_id,
        index=number,
        vendor=Vendor(str(gpu.get("vendor") or Vendor.AMD.value).lower()),
        product=str(gpu.get("product") or "GPU"),
        market_name=f"{gpu.get('product') or 'GPU'} on {node}",
        memory_bytes=size,
        compute_units=None,
        layout=layout or _unknown_layout(device_id, name, size, {f"{node}/{one}": held for one, held in in_use.items()}),
        layouts=known or tuple(_unknown_layout(device_id, str(each), 0, {}) for each in gpu.get("layouts") or ()),
        simulated=bool(gpu.get("simulated")),
    )


def _known_layouts(device_id: str, gpu: Mapping[str, Any]) -> tuple[Layout, ...]:
    """By the maker's figures; empty for a GPU that is not known, or has another size than they give."""
    try:
        product = find_product(str(gpu.get("product")))
    except UnknownProduct:
        return ()
    if product.memory_bytes != gpu.get("memoryBytes"):
        return ()
    book, names = LayoutBook(product, device_id), [str(gpu.get("layout")), *map(str, gpu.get("layouts") or ())]
    found: list[Layout] = []
    for name in dict.fromkeys(names):
        with contextlib.suppress(AimGpuError):  # a layout that such a GPU does not have
            found += [layout for layout in [book.find(name, book.default)] if layout is not None]
    return tuple(found)


def _unknown_layout(device_id: str, name: str, size: int, in_use: Mapping[str, int]) -> Layout:
    """The partitions that workloads have a share of, and one for the rest."""
    compute_mode, _, memory_mode = name.partition("/")
    parts = [_partition(device_id, each, at, held) for at, (each, held) in enumerate(sorted(in_use.items()))]
    rest = size - sum(part.memory_bytes for part in parts)
    if not parts or rest > _GB:
        parts.append(_partition(device_id, f"{device_id}/{_REST if parts else 'all'}", len(parts), max(rest, 0)))
    return Layout(name=name, compute_mode=compute_mode or None, memory_mode=memory_mode or None, partitions=tuple(parts))


def _partition(device_id: str, partition_id: str, index: int, memory_bytes: int) -> Partition:
    kind = partition_id.rpartition("/")[2].partition("-")[0]
    return Partition(id=partition_id, device_id=device_id, index=index, kind=kind, memory_bytes=memory_bytes)


def _partitions_in_use(shares: Sequence[Object]) -> dict[tuple[str, str], dict[str, int]]:
    """By node and GPU, the partitions that workloads have a share of, with their sizes."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for share in shares:
        with leaving_out(share):
            for replica in (share.get("status") or {}).get("replicas") or ():
                info = replica.get("partitionInfo") or {}
                size = round(float(info.get("partitionSizeGB") or 0) * _GB)
                if replica.get("node") and replica.get("gpu") and info.get("partitionId") and size:
                    found.setdefault((replica["node"], replica["gpu"]), {})[str(info["partitionId"])] = size
    return found


def _held_by_others(objects: ClusterObjects) -> dict[str, dict[str, int]]:
    """By GPU and partition: what pods have a share of that serve no model, or that are not seen."""
    if objects.one_namespace and any("partitions" in gpu for node in objects.nodes for gpu in _gpus_of(node)):
        return _granted_to_unseen(objects)
    ours = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in objects.pods}
    found: dict[str, dict[str, int]] = {}
    first: dict[tuple[str, str], tuple[str, str]] = {}  # pods that share a claim hold its memory together
    for share in objects.shares:
        with leaving_out(share):
            for replica in (share.get("status") or {}).get("replicas") or ():
                info = replica.get("partitionInfo") or {}
                place = (share["metadata"]["namespace"], replica.get("pod"))
                if replica.get("claim") and first.setdefault((place[0], replica["claim"]), place) != place:
                    continue
                if place not in ours and replica.get("node") and replica.get("gpu") and info.get("partitionId"):
                    held = found.setdefault(f"{replica['node']}/{replica['gpu']}", {})
                    name = f"{replica['node']}/{info['partitionId']}"
                    held[name] = held.get(name, 0) + round(float(info.get("allocatedMemoryGB") or 0) * _GB)
    return found


def _granted_to_unseen(objects: ClusterObjects) -> dict[str, dict[str, int]]:
    """What the nodes granted, less what the models that are seen hold of it."""
    names = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in objects.pods}
    seen: dict[str, int] = {}
    for share in objects.shares:
        with leaving_out(share):
            for replica in (share.get("status") or {}).get("replicas") or ():
                if (share["metadata"]["namespace"], replica.get("pod")) in names:
                    partition = f"{replica.get('node')}/{(replica.get('partitionInfo') or {}).get('partitionId')}"
                    seen[partition] = seen.get(partition, 0) + (granted_bytes(replica) or 0)
    found: dict[str, dict[str, int]] = {}
    for node in objects.nodes:
        name = node["metadata"]["name"]
        for gpu in _gpus_of(node):
            with leaving_out(node):
                for part in gpu.get("partitions") or ():
                    unseen = int(part["grantedBytes"]) - seen.get(f"{name}/{part['id']}", 0)
                    if unseen > 0:
                        found.setdefault(f"{name}/{gpu['id']}", {})[f"{name}/{part['id']}"] = unseen
    return found


def _unhealthy(nodes: Sequence[Object]) -> dict[str, str]:
    return {
        f"{node['metadata']['name']}/{gpu['id']}": str(gpu["unhealthy"])
        for node in nodes
        for gpu in _gpus_of(node)
        if gpu.get("unhealthy")
    }


def _gpus_of(node: Object) -> Sequence[Mapping[str, Any]]:
    with leaving_out(node):
        return [gpu for gpu in (node.get("status") or {}).get("gpus") or () if isinstance(gpu, dict)]
    return ()
