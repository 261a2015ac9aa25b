"""What KAI granted a pod, from the pod's labels and the ConfigMap that its binder wrote. Pure.

Both are in the pod's namespace, where its owner may write them. What is believed of them is bounded by what the owner cannot
write: the GPU must be one that a reservation pod of KAI, in KAI's own namespace, holds for the pod's group on the pod's node.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from aimgpu.domain import Device, Partition
from aimgpu.errors import Conflict
from aimgpu.kubernetes.api.foreign_objects import read_count
from aimgpu.units import MIB, PPM

_GROUP = "runai-gpu-group"
_PORTION, _DEVICES = "GPU_PORTION", "NVIDIA_VISIBLE_DEVICES"
_MEMORY = "gpu-memory"
_MOST_MEMORY_MIB = 1 << 30  # a PiB
_PERCENT = PPM // 100
_SCHEDULER = "kai-scheduler"
_RESERVED = "run.ai/reserve_for_gpu_index"  # annotation of a reservation pod: the GPU that it holds
_NUMBER = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class KaiGrant:
    """So much of each of these GPUs."""

    devices: tuple[str, ...]  # as KAI names them: UUIDs
    portion_ppm: int
    memory_mib: int | None = None  # asked for in MiB; KAI's portion is that rounded to two digits

    def memory_bytes(self, partition: Partition) -> int:
        """Whole MiB. What was asked for in MiB is not rounded, and is at most the portion, which KAI rounds to a percent."""
        if self.memory_mib is not None:
            most = partition.memory_bytes * min(self.portion_ppm + _PERCENT, PPM) // PPM
            return min(self.memory_mib * MIB, most // MIB * MIB)
        return max(partition.memory_bytes * self.portion_ppm // PPM // MIB, 1) * MIB


def config_map_of(pod: Mapping[str, Any]) -> str:
    """Its name, from the variable that KAI's admission gave the container. Raises Conflict where KAI did not."""
    containers = (*(pod["spec"].get("containers") or ()), *(pod["spec"].get("initContainers") or ()))
    for container in containers:
        for variable in container.get("env") or ():
            reference = (variable.get("valueFrom") or {}).get("configMapKeyRef")
            if variable.get("name") == _PORTION and reference:
                return str(reference["name"])
    raise Conflict(
        f"pod {_label(pod)} has no part of a GPU from KAI-Scheduler",
        hint="Is KAI's GPU sharing enabled (global.gpuSharing=true)?",
    )


def read_grant(pod: Mapping[str, Any], config_map: Mapping[str, Any], reservations: Sequence[Mapping[str, Any]]) -> KaiGrant:
    """`reservations`: pods of `KAI_RESERVATIONS`. Raises Conflict where KAI has not placed the pod, or did not write this."""
    metadata, data = pod["metadata"], config_map.get("data") or {}
    labels = metadata.get("labels") or {}
    groups = [name for name in labels if name == _GROUP or name.startswith(f"{_GROUP}/")]
    devices = tuple(filter(None, (text.rpartition("=")[2].strip() for text in str(data.get(_DEVICES) or "").split(","))))
    portion = str(data.get(_PORTION) or "")
    if not groups or not devices or not _NUMBER.fullmatch(portion):
        raise Conflict(f"KAI-Scheduler has not granted pod {_label(pod)} a part of a GPU yet")
    if pod["spec"].get("schedulerName") != _SCHEDULER:
        raise Conflict(f"pod {_label(pod)} was not placed by KAI-Scheduler", hint=f"Set schedulerName: {_SCHEDULER}.")
    held = _held(reservations, {labels[name] for name in groups}, pod["spec"].get("nodeName"))
    if not set(devices) <= held:
        missing = ", ".join(sorted(set(devices) - held))
        raise Conflict(f"KAI-Scheduler holds no GPU {missing} for the group of pod {_label(pod)} on its node")
    memory = (metadata.get("annotations") or {}).get(_MEMORY)
    return KaiGrant(
        devices=devices,
        portion_ppm=min(int(Decimal(portion) * PPM), PPM),
        memory_mib=read_count(memory, most=_MOST_MEMORY_MIB),
    )


def _held(reservations: Sequence[Mapping[str, Any]], groups: Collection[str], node: str | None) -> set[str]:
    """The GPUs that KAI holds for these groups on this node."""
    found = set()
    for one in reservations:
        metadata = one["metadata"]
        mine = (metadata.get("labels") or {}).get(_GROUP) in groups
        if mine and node and (one.get("spec") or {}).get("nodeName") == node:
            found.add(str((metadata.get("annotations") or {}).get(_RESERVED)))
    return found


def find_partition(name: str, devices: Sequence[Device]) -> Partition:
    """The GPU that KAI names; its only partition. Raises Conflict where there is none, or it is divided."""
    for device in devices:
        for partition in device.layout.partitions:
            if name in (partition.uuid, device.id, partition.id, str(device.index)):
                if name != partition.uuid and len(device.layout.partitions) > 1:
                    raise Conflict(f"GPU {name} is divided into partitions, of which KAI-Scheduler names none")
                return partition
    known = ", ".join(device.id for device in devices)
    raise Conflict(f"KAI-Scheduler granted GPU {name}, which this node does not have", hint=f"It has {known or 'none'}.")


def _label(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata'].get('namespace')}/{pod['metadata'].get('name')}"
