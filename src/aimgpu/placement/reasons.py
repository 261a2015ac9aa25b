"""The codes by which a refusal says why a device will not do."""

from enum import StrEnum


class ReasonCode(StrEnum):
    """Stable: metrics, pages and scripts go by them."""

    MEMORY = "memory"
    BUSY = "busy"
    FOREIGN = "foreign"
    COMPUTE = "compute"
    CPU = "cpu"
    HOST_MEMORY = "host_memory"
    LAYOUT = "layout"
    ISOLATION = "isolation"
    PRODUCT = "product"
    VENDOR = "vendor"
    WITH = "with"
    NOT_WITH = "not_with"
    PARTITION = "partition"
    COUNT = "count"
    RESERVED = "reserved"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    ReasonCode.MEMORY: "Less memory is free, or in one partition, than is wanted; or less is wanted than the model needs.",
    ReasonCode.BUSY: "A whole partition is required, and another model has a share of it.",
    ReasonCode.FOREIGN: "It would fit but for what processes that are not ours were measured to hold.",
    ReasonCode.COMPUTE: "Less of its compute is free than is wanted.",
    ReasonCode.CPU: "Its node has too little CPU free.",
    ReasonCode.HOST_MEMORY: "Its node has too little host memory free.",
    ReasonCode.LAYOUT: "Its layout has no such partition, or is not whole; or grants stand on partitions that it lost.",
    ReasonCode.ISOLATION: "The level of isolation that is demanded is not available there.",
    ReasonCode.PRODUCT: "It is a GPU model that is not wanted.",
    ReasonCode.VENDOR: "It is of a vendor that is not wanted.",
    ReasonCode.WITH: "A deployment that must be on the same GPU is not.",
    ReasonCode.NOT_WITH: "A deployment that is to be avoided is there.",
    ReasonCode.PARTITION: "It does not have the partition that was named.",
    ReasonCode.COUNT: "It would do, but its node has fewer such GPUs than are wanted together.",
    ReasonCode.RESERVED: "Its node is held for asks of more GPUs.",
}
