"""The library for scripts: sizing, partitions, scheduling, compute limits and request queues of one GPU.

`ModelScheduler` places models on the partitions of a `ROCmPartitioner` (simulated) or `ROCmPartitionerReal` and accounts for
their memory exactly; `ModelSizingConfig` estimates what a model needs; `ResourceIsolator` divides compute between partitions
and models; `QoSManager` orders requests and measures objectives. Nothing here starts an engine: `aimgpu up` does. Sizes in GB
are 10^9 bytes. Errors are those of `aimgpu.errors`.
"""

from aimgpu.runtime.isolator import AppliedLimit, ComputeLimits, ResourceIsolator
from aimgpu.runtime.latency import Times
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
from aimgpu.runtime.sizing import FitAnswer, ModelSizeInfo, ModelSizingConfig

__all__ = [
    "AppliedLimit",
    "Compliance",
    "ComputeLimits",
    "ComputePartitionMode",
    "FitAnswer",
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
    "Times",
]
