"""The library for scripts: sizing, partitions, scheduling, compute limits and request queues of one GPU.

`ModelScheduler` places models on the partitions of a `ROCmPartitioner` (simulated) or `ROCmPartitionerReal` and accounts for
their memory exactly; `ModelSizingConfig` estimates what a model needs; `ResourceIsolator` divides compute between partitions
and models; `QoSManager` orders requests and measures objectives. Nothing here starts an engine: `aimgpu up` does. Sizes in GB
are 10^9 bytes. Errors are those of `aimgpu.errors`.

Rules that a script should know, with their reasons:

- An MI300X has 206.1 GB (192 GiB). `[100, 100]` and `[48, 48, 48, 48]` are layouts of it; 4 GB stay undivided.
- The memory reserve belongs to the layout, not to the model. `can_fit` counts it only where `reserve_gb` is given.
- `memory_gb` of `add_model` is charged as given. A figure below the weights is refused. `aimgpu catalogue add` takes the larger
  of the listed memory and the estimate, because the daemon starts the engine, and an engine with too little memory fails.
- `recommended_partition_gb` is the given one. Without one it is the need and a tenth more.
- An unknown partition raises UnknownPartition from `environment`. An empty environment would show the process every GPU.
- Priorities 1 to 10 form three classes: 1 to 3 low, 4 to 7 medium, 8 to 10 high. A scheduled model keeps its number;
  requests are ordered by class, then by deadline.
- Compute limits have no priority: the floors of all partitions are kept at once. A limit of more units than the partition has
  is refused; four partitions of an MI300X have 76 compute units each.
- A guarantee may be 0, a limit may not: such a model would never run.
- `compliant` is None while there is no objective or no request. Nothing was kept and nothing was broken;
  `compliant is not False` is true then.
- `validate` reports a partition that the layout lost only where someone else changed the layout of a real GPU. Here a layout
  does not change under scheduled models.
"""

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.qos.queueing.guarantees import Guarantee
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
    "Guarantee",
    "MemoryPartition",
    "MemoryPartitionMode",
    "ModelInstance",
    "ModelScheduler",
    "ModelSizeInfo",
    "ModelSizingConfig",
    "ModelStatus",
    "Priority",
    "QoSManager",
    "QoSRequest",
    "ROCmPartitioner",
    "ROCmPartitionerReal",
    "ResourceIsolator",
    "RuntimePartitioner",
    "ServiceObjective",
    "Times",
]
