"""The small library surface that people script against, thin over the rooms below.

`ModelScheduler` places models on the Partitions of a `ROCmPartitioner` (simulated) or `ROCmPartitionerReal` and keeps exact
books; `ModelSizingConfig` says what a model needs; `ResourceIsolator` divides compute between Partitions; `QoSManager` orders
requests and keeps score of promises. Nothing here starts an engine: that is `aimgpu up`. Sizes in GB are 10^9 bytes.
"""

from aimgpu.runtime.isolator import ComputeLimits, ResourceIsolator
from aimgpu.runtime.partitioner import (
    ComputePartitionMode,
    MemoryPartition,
    MemoryPartitionMode,
    ROCmPartitioner,
    RuntimePartitioner,
)
from aimgpu.runtime.qos import Compliance, QoSManager, QoSRequest
from aimgpu.runtime.real import ROCmPartitionerReal
from aimgpu.runtime.scheduler import ModelInstance, ModelScheduler, ModelStatus
from aimgpu.runtime.sizing import ModelSizeInfo, ModelSizingConfig

__all__ = [
    "Compliance",
    "ComputeLimits",
    "ComputePartitionMode",
    "MemoryPartition",
    "MemoryPartitionMode",
    "ModelInstance",
    "ModelScheduler",
    "ModelSizeInfo",
    "ModelSizingConfig",
    "ModelStatus",
    "QoSManager",
    "QoSRequest",
    "ROCmPartitioner",
    "ROCmPartitionerReal",
    "ResourceIsolator",
    "RuntimePartitioner",
]
