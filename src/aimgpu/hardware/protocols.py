"""What a hardware backend offers, one capability a protocol."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Device, DeviceUsage, Partition


class DeviceReader(Protocol):
    """Reads what GPUs there are."""

    def read_devices(self) -> tuple[Device, ...]:
        """Every device with the layout that it has now, as read, not as asked."""


class UsageReader(Protocol):
    """Reads what is in use on them."""

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """Measured memory, utilisation and processes of every device."""


class Partitioner(Protocol):
    """Changes their layouts."""

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """Change the layout and return the device as read back.

        A memory mode takes the whole hive to the same layout and needs a driver reload: without `reload_driver` that raises
        DriverReloadNeeded and changes nothing. Raises PartitionBusy (naming the processes), UnknownLayout, NotAllowed or
        LayoutNotApplied.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Environment and device nodes with which a workload sees its partition and no other."""

    environment: Mapping[str, str]
    device_nodes: tuple[str, ...] = field(default=())


class Identifier(Protocol):
    """Makes one partition visible to a workload."""

    def identify(self, device: Device, partition: Partition) -> Identity:
        """Raises HardwareUnavailable where no program can use the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about the machine's GPUs that reading them could not raise: the rest still works."""

    code: str  # stable: "no-driver", "no-permission", "old-driver", "lost", "mig-pending"
    subject: str | None  # device id or bus address
    text: str
    hint: str | None = None
    serious: bool = True  # False: worth knowing, and nothing is wrong


class Inspector(Protocol):
    """Reports what is wrong with them."""

    def inspect(self) -> tuple[Finding, ...]:
        """What is wrong or missing: a GPU without a driver, a lost GPU, answers that an old driver does not have."""


class Hardware(DeviceReader, UsageReader, Partitioner, Identifier, Inspector, Protocol):
    """Everything the controller needs of the machine's GPUs."""


class HelperProcesses(Protocol):
    """Processes of ours that hold a partition for our tenants, such as an MPS server: no tenant, and no stranger."""

    def pids(self) -> frozenset[int]:
        """Of all of them, now."""

    def dismiss(self, uuids: Collection[str]) -> tuple[str, ...]:
        """End those of these partitions, which have no tenants any more; returns whose there were.

        The next tenant brings them back. Raises PartitionBusy, naming tenants that are left, or HardwareFailed.
        """


class NoHelperProcesses:
    """Where nothing but tenants runs."""

    def pids(self) -> frozenset[int]:
        """Of all of them, now."""
        return frozenset()

    def dismiss(self, uuids: Collection[str]) -> tuple[str, ...]:
        """There are none to end."""
        del uuids
        return ()
