"""What an instance is started in: the variables and device nodes of each Partition that it was granted."""

from collections.abc import Mapping

from aimgpu.control.parts import Parts
from aimgpu.domain import Device, Instance, Partition
from aimgpu.errors import HardwareFailed

_LISTS = {  # one entry a visible Device, and what stands between two
    "ROCR_VISIBLE_DEVICES": ",",
    "HIP_VISIBLE_DEVICES": ",",
    "CUDA_VISIBLE_DEVICES": ",",
    "NVIDIA_VISIBLE_DEVICES": ",",
    "AIMGPU_REGION": ":",
}


def make_surroundings(parts: Parts, instance: Instance) -> tuple[dict[str, str], tuple[str, ...]]:
    """Identity of each granted Partition and what isolation adds; refuses a Level below the one that was charged."""
    environment: dict[str, str] = {}
    nodes: list[str] = []
    for grant in instance.grants:
        device, partition = find_partition(parts, grant.device_id, grant.partition_id)
        identity = parts.hardware.identify(device, partition)
        enforcement = parts.isolator.enforce(grant, device, partition)
        if enforcement.level.rank < grant.level.rank:
            raise HardwareFailed(f"{grant.partition_id} can give {enforcement.level}, {grant.level} was granted")
        join_environment(environment, {**identity.environment, **enforcement.environment})
        nodes += identity.device_nodes
    return environment, tuple(dict.fromkeys(nodes))


def find_partition(parts: Parts, device_id: str, partition_id: str) -> tuple[Device, Partition]:
    for device in parts.hardware.read_devices():
        if device.id == device_id and (partition := device.partition(partition_id)) is not None:
            return device, partition
    raise HardwareFailed(f"{partition_id} is gone", hint="The layout of the device changed; apply the stack again.")


def join_environment(environment: dict[str, str], more: Mapping[str, str]) -> None:
    """An instance on several Devices sees all of them."""
    for name, value in more.items():
        before = environment.get(name, value)
        environment[name] = f"{before}{_LISTS[name]}{value}" if name in _LISTS and before != value else value
