"""Names that users, charts and other programs see. Changing one breaks them."""

GROUP = "aim.amd.com"

# Dynamic resource allocation.
DRIVER = "gpu.aim.amd.com"
WHOLE_CLASS = "gpu.aim.amd.com"
PARTITION_CLASS = "partition.gpu.aim.amd.com"
SHARED_CLASS = "shared.gpu.aim.amd.com"
SHARED_PARTITION_CLASS = "shared-partition.gpu.aim.amd.com"
SEAT_CLASS = "kai.gpu.aim.amd.com"  # for pods that KAI-Scheduler places: what they hold is read from KAI's records
WHOLE_RESOURCE = "aim.amd.com/gpu"  # for plain `resources.limits`, answered by the class above
PARTITION_RESOURCE = "aim.amd.com/gpu-partition"
SHARED_RESOURCE = "aim.amd.com/gpu-shared"
PARAMETERS_VERSION = "gpu.aim.amd.com/v1alpha1"
PARAMETERS_KIND = "GpuClaimParameters"

# Capacities of a device.
MEMORY = "memory"  # bytes
COMPUTE = "compute"  # percent of the device; 0: no limit, its turn comes as that of everybody

# Attributes of a device; unqualified names belong to the driver's domain.
TYPE = "type"
TYPE_WHOLE = "gpu"
TYPE_PARTITION = "partition"
TYPE_SHARED = "shared"
TYPE_DIVISIBLE = "divisible"  # one device for both: whole where a request names no memory, else a share
TYPE_SEAT = "seat"

# Taints of a device.
TAINT_UNHEALTHY = "gpu.aim.amd.com/unhealthy"
TAINT_FOREIGN = "gpu.aim.amd.com/foreign-processes"
TAINT_REPARTITIONING = "gpu.aim.amd.com/repartitioning"

# Container device interface.
CDI_KIND = "gpu.aim.amd.com/claim"
CDI_REPLICA_KIND = "gpu.aim.amd.com/replica"

# What a container finds in its environment.
MEMORY_VARIABLE = "AIMGPU_MEMORY_BYTES"
COMPUTE_VARIABLE = "AIMGPU_COMPUTE_PERCENT"
LEVEL_VARIABLE = "AIMGPU_LEVEL"

# Label that admission puts on pods with a claim of ours, so that they can be watched apart from all others.
LABEL_SHARE = "aim.amd.com/gpu-share"

# Labels of a node that choose a key of the device plugin's ConfigMap; ours wins.
LABEL_PLUGIN_CONFIG = "aim.amd.com/device-plugin.config"
NVIDIA_PLUGIN_CONFIG = "nvidia.com/device-plugin.config"

# On a node while a PartitionPlan changes it: the plan's uid, so that the node can be let go when the plan is gone.
LABEL_PLAN = "aim.amd.com/partition-plan"
TAINT_NODE = "aim.amd.com/repartitioning"  # taint beside the cordon: what tolerates a cordon stays away too
KEEP_TAINT = "aim.amd.com/partition-plan.keep-taint"  # annotation: the Device Config Manager's taint was there before the plan

# Labels that the node agent writes.
LABEL_MANAGED = "aim.amd.com/gpu-sharing.managed"
LABEL_COUNT = "aim.amd.com/gpu.count"
LABEL_PRODUCT = "aim.amd.com/gpu.product"
LABEL_MEMORY_MIB = "aim.amd.com/gpu.memory"
LABEL_SIMULATED = "aim.amd.com/gpu.simulated"
