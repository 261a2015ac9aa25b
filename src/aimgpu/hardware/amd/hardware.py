"""AMD GPUs behind the protocol of the room."""

from dataclasses import replace

from aimgpu.domain import Device, DeviceUsage, Partition
from aimgpu.errors import HardwareUnavailable
from aimgpu.hardware.amd.change import AmdPartitioner, Patience
from aimgpu.hardware.amd.control_path import ControlPath, FilesElseTool
from aimgpu.hardware.amd.devices import describe_devices, without_partitions
from aimgpu.hardware.amd.findings import inspect_machine
from aimgpu.hardware.amd.gpus import AmdGpu, read_gpus
from aimgpu.hardware.amd.reload import DriverReloader, ModprobeReloader
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.hardware.amd.topology import GENERATION
from aimgpu.hardware.amd.usage import AmdUsageReader
from aimgpu.hardware.amd.writers import ModeWriter, SysfsWriter
from aimgpu.hardware.protocols import Finding, Identity

KFD_NODE = "/dev/kfd"


class AmdHardware:
    """Reads the kernel's files; changes go through `writer`, by default those same files or, if they are closed, amd-smi."""

    def __init__(
        self,
        sysfs: Sysfs | None = None,
        *,
        writer: ModeWriter | None = None,
        reloader: DriverReloader | None = None,
        patience: Patience | None = None,
        smi: AmdSmi | None = None,
    ) -> None:
        self._sysfs = sysfs or Sysfs()
        self._smi = smi or AmdSmi()
        path = ControlPath(writer=writer or SysfsWriter(self._sysfs), reloader=reloader or ModprobeReloader(self._sysfs))
        choose = FilesElseTool(path, self._sysfs, self._smi) if writer is None else lambda _gpu, _file: path
        self._partitioner = AmdPartitioner(self._sysfs, choose, patience=patience, smi=self._smi)
        self._usage = AmdUsageReader(self._sysfs)
        self._names: dict[str, str] | None = None  # by PCI address, as amd-smi reports
        self._seen: tuple[str, tuple[AmdGpu, ...], tuple[Device, ...]] | None = None

    def read_devices(self) -> tuple[Device, ...]:
        """Every AMD GPU with the modes that it has now."""
        return self._read()[1]

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """Cheap to poll: the devices are read again only when the topology changed."""
        generation = self._sysfs.read(GENERATION)
        if self._seen is None or generation is None or generation != self._seen[0]:
            self._read()
        gpus, devices = self._seen[1:] if self._seen else self._read()
        return self._usage.read(gpus, devices)

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """Raises what `Partitioner` names."""
        self._seen = None
        return self._partitioner.apply_layout(device_id, layout_name, reload_driver=reload_driver)

    def identify(self, device: Device, partition: Partition) -> Identity:
        """Reads again: an index among all GPUs is right only for the layouts that there are now."""
        gpus, devices = self._read()
        for gpu, now in zip(gpus, devices, strict=True):
            if now.id == device.id and now.partition(partition.id) is not None:
                return _identity(gpu, now, partition.index)
        raise HardwareUnavailable(
            f"{partition.id} is not there any more",
            hint="The GPU's layout changed, or the GPU went away. Look at `aimgpu gpus`.",
        )

    def inspect(self) -> tuple[Finding, ...]:
        """What is wrong with the GPUs or their driver."""
        return inspect_machine(self._sysfs, self._read()[0], self._smi)

    def _read(self) -> tuple[tuple[AmdGpu, ...], tuple[Device, ...]]:
        generation = self._sysfs.read(GENERATION) or ""
        gpus = read_gpus(self._sysfs, self._seen[1] if self._seen else ())
        devices = tuple(map(self._named, gpus, describe_devices(gpus)))
        self._seen = (generation, gpus, devices)
        return gpus, devices

    def _named(self, gpu: AmdGpu, device: Device) -> Device:
        """A name that the kernel does not report is asked of the tool, once."""
        if device.market_name is not None or not self._smi.is_installed:
            return device
        if self._names is None:
            self._names = self._smi.find_market_names()
        return replace(device, market_name=self._names.get(gpu.bdf))


class ServingAmdHardware(AmdHardware):
    """Where models are started from here: without /dev/kfd, as in a container that did not get it, no GPU has a partition.

    Where others start them, as on a Kubernetes node, only they need that file.
    """

    def read_devices(self) -> tuple[Device, ...]:
        """Every AMD GPU with the modes that it has now; without partitions where no program could open it."""
        devices = super().read_devices()
        return devices if (self._sysfs.dev / "kfd").exists() else tuple(map(without_partitions, devices))


def _identity(gpu: AmdGpu, device: Device, index: int) -> Identity:
    if not gpu.nodes:
        raise HardwareUnavailable(
            f"no model can run on {device.id}: the compute driver (KFD) does not know it",
            hint="Use a kernel with CONFIG_HSA_AMD, or ROCm's amdgpu-dkms. `aimgpu doctor` has the details.",
        )
    place = next(place for place, partition in enumerate(device.layout.partitions) if partition.index == index)
    node, partition = gpu.nodes[place], device.layout.partitions[place]
    first = index * (node.xccs or 0)
    environment = {
        # HIP counts within what ROCr shows: setting HIP_VISIBLE_DEVICES too would filter twice.
        "ROCR_VISIBLE_DEVICES": partition.uuid or str(node.ordinal),
        "AIM_PARTITION_ID": str(partition.index),
        "AIM_PARTITION_STABLE_ID": partition.id,
    }
    if device.layout.compute_mode is not None:
        environment["AIM_COMPUTE_MODE"] = device.layout.compute_mode
    if device.layout.memory_mode is not None:
        environment["AIM_MEMORY_MODE"] = device.layout.memory_mode
    if node.xccs and len(device.layout.partitions) > 1:  # the only partition has every die
        environment["AIM_XCD_ID"] = ",".join(str(xcd) for xcd in range(first, first + node.xccs))
    return Identity(
        environment=environment, device_nodes=(KFD_NODE, *([partition.render_node] if partition.render_node else []))
    )
