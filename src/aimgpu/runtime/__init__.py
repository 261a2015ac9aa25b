"""The small library surface that people script against, thin over the rooms below.

`ModelScheduler` places models on the Partitions of a `ROCmPartitioner` (simulated) or `ROCmPartitionerReal` and keeps exact
books; `ModelSizingConfig` says what a model needs; `ResourceIsolator` divides compute between Partitions. Nothing here starts
an engine: that is `aimgpu up`. Sizes in GB are 10^9 bytes.
"""

from aimgpu.runtime.isolator import ComputeLimits, ResourceIsolator
from aimgpu.runtime.partitioner import (
    ComputePartitionMode,
    MemoryPartition,
    MemoryPartitionMode,
    Partitioner,
    ROCmPartitioner,
)
from aimgpu.runtime.real import ROCmPartitionerReal
from aimgpu.runtime.scheduler import ModelInstance, ModelScheduler, ModelStatus
from aimgpu.runtime.sizing import ModelSizeInfo, ModelSizingConfig

__all__ = [
    "ComputeLimits",
    "ComputePartitionMode",
    "MemoryPartition",
    "MemoryPartitionMode",
    "ModelInstance",
    "ModelScheduler",
    "ModelSizeInfo",
    "ModelSizingConfig",
    "ModelStatus",
    "Partitioner",
    "ROCmPartitioner",
    "ROCmPartitionerReal",
    "ResourceIsolator",
]
