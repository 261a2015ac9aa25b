"""Names that users, charts and other programs see. Changing one breaks them."""

GROUP = "aim.amd.com"

# Dynamic resource allocation.
DRIVER = "gpu.aim.amd.com"
WHOLE_CLASS = "gpu.aim.amd.com"
PARTITION_CLASS = "partition.gpu.aim.amd.com"
SHARED_CLASS = "shared.gpu.aim.amd.com"
SHARED_PARTITION_CLASS = "shared-partition.gpu.aim.amd.com"
SEAT_CLASS = "kai.gpu.aim.amd.com"  # for pods that KAI-Scheduler places: what they hold is read from KAI's records
CLASSES = (WHOLE_CLASS, PARTITION_CLASS, SHARED_CLASS, SHARED_PARTITION_CLASS, SEAT_CLASS)
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

# Of the devices of a claim in its status, where a node cannot prepare one that is gone: its pod is to be placed again.
DEVICE_GONE = "DeviceGone"

# Container device interface.
CDI_KIND = "gpu.aim.amd.com/claim"
CDI_REPLICA_KIND = "gpu.aim.amd.com/replica"

# What a container finds in its environment.
MEMORY_VARIABLE = "AIMGPU_MEMORY_BYTES"
COMPUTE_VARIABLE = "AIMGPU_COMPUTE_PERCENT"
LEVEL_VARIABLE = "AIMGPU_LEVEL"

# Label that admission puts on pods with a claim of ours, so that they can be watched apart from all others.
LABEL_SHARE = "aim.amd.com/gpu-share"

MANAGED_BY = {"app.kubernetes.io/managed-by": "aim-gpu-sharing"}  # labels of what we write for pods that users make
UNUSED_SINCE = f"{GROUP}/unused-since"  # annotation of a claim template that no pod refers to: it is about to be removed
WEBHOOKS = "aim-gpu-sharing"  # the webhook configurations
KAI_RESERVATIONS = "kai-resource-reservation"  # namespace of the pods that hold a GPU for KAI; they are nobody's tenants

# Labels of a node that choose a key of the device plugin's ConfigMap; ours wins.
LABEL_PLUGIN_CONFIG = "aim.amd.com/device-plugin.config"
NVIDIA_PLUGIN_CONFIG = "nvidia.com/device-plugin.config"

# Placement: admission's gate on a pod, what the placer did with it, and the namespaces where it is on.
GATE = "aim.amd.com/placement"
HINT = "aim.amd.com/placement-hint"  # annotation of a pod: the node that kube-scheduler was to look at first
UNHINTED = "aim.amd.com/placement-skipped"  # annotation of a pod: why it was left to kube-scheduler
LABEL_PLACEMENT = "aim.amd.com/placement"  # of a namespace, with the value "enabled"
PLACER_LEASE = "aim-gpu-sharing-placer"
OPERATOR_ACCOUNT, GATEWAY_ACCOUNT = "aim-gpu-sharing-operator", "aim-gpu-sharing-gateway"

# The node agents' pods, as the chart makes them.
AGENT_ACCOUNT, AGENT_LABEL = "aim-gpu-sharing-agent", "app.kubernetes.io/component=agent"

# On a node while a PartitionPlan changes it: the plan's uid, so that the node can be let go when the plan is gone.
LABEL_PLAN = "aim.amd.com/partition-plan"
TAINT_NODE = "aim.amd.com/repartitioning"  # taint beside the cordon: what tolerates a cordon stays away too
KEEP_TAINT = "aim.amd.com/partition-plan.keep-taint"  # annotation: the Device Config Manager's taint was there before the plan

# Conditions of a GpuNode about what the device plugin offers.
OFFERED_HERE_ONLY = "OfferedHereOnly"
RESOURCES_OFFERED = "ResourcesOffered"

# Labels that the node agent writes.
LABEL_MANAGED = "aim.amd.com/gpu-sharing.managed"
LABEL_COUNT = "aim.amd.com/gpu.count"
LABEL_PRODUCT = "aim.amd.com/gpu.product"
LABEL_MEMORY_MIB = "aim.amd.com/gpu.memory"
LABEL_SIMULATED = "aim.amd.com/gpu.simulated"
NODE_LABELS = (
    LABEL_MANAGED,
    LABEL_COUNT,
    LABEL_PRODUCT,
    LABEL_MEMORY_MIB,
    LABEL_SIMULATED,
    "nvidia.com/gpu.count",
    "nvidia.com/gpu.product",
    "nvidia.com/gpu.memory",
    "nvidia.com/gpu.replicas",
    "nvidia.com/gpu.sharing-strategy",
    "amd.com/gpu.product-name",
    "amd.com/gpu.vram",
    "amd.com/gpu.compute-memory-partition",
    "amd.com/gpu.compute-partitioning-supported",
    "amd.com/gpu.memory-partitioning-supported",
    "amd.com/gpu.replicas",
)
