"""What a device was measured to use."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProcess:
    """A process on a device; foreign until the controller recognises its pid."""

    pid: int
    name: str | None
    memory_bytes: int | None
    partition_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """Measured, not granted. None means that the device did not say."""

    device_id: str
    used_bytes: int | None
    used_bytes_by_partition: Mapping[str, int]
    utilization_percent: int | None
    processes: tuple[ForeignProcess, ...]
