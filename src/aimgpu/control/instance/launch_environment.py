"""What an instance is started in: the variables and device nodes of each partition that it was granted."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.control.dependencies import Dependencies
from aimgpu.domain import Device, Grant, Instance, Partition
from aimgpu.errors import AimGpuError, HardwareFailed
from aimgpu.hardware.visible_devices import at_position, join_environment
from aimgpu.isolation.protocols import Isolator, Resizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    environment: Mapping[str, str]
    device_nodes: tuple[str, ...]
    grants: tuple[Grant, ...]  # with what makes each true, and at which level
    control_group: Path | None = None


def make_launch_environment(dependencies: Dependencies, instance: Instance, devices: Sequence[Device]) -> LaunchEnvironment:
    """Identity of each granted partition and what isolation adds; refuses a level below the one that was charged."""
    environment: dict[str, str] = {}
    nodes: list[str] = []
    grants: list[Grant] = []
    group: Path | None = None
    grouped = dependencies.launchers[instance.launcher].joins_groups
    for position, grant in enumerate(instance.grants):
        device, partition = find_partition(devices, grant.device_id, grant.partition_id)
        identity = dependencies.hardware.identify(device, partition)
        enforcement = dependencies.isolator.enforce(grant, device, partition, grouped=grouped)
        if enforcement.level.rank < grant.level.rank:
            raise HardwareFailed(f"{grant.partition_id} can give {enforcement.level}, {grant.level} was granted")
        join_environment(environment, {**identity.environment, **at_position(enforcement.environment, position)})
        nodes += identity.device_nodes
        group = enforcement.control_group or group
        grants.append(replace(grant, level=enforcement.level, mechanisms=enforcement.mechanisms))
    nodes = list(dict.fromkeys(nodes))
    return LaunchEnvironment(environment=environment, device_nodes=tuple(nodes), grants=tuple(grants), control_group=group)


def set_limits(isolator: Isolator, instance: Instance) -> None:
    """A resize that a crash cut short: the limit becomes what the ledger says, which is never less than what it was."""
    if not isinstance(isolator, Resizer):
        return
    for grant in instance.grants:
        try:
            isolator.resize(grant, grant.memory_bytes)
        except AimGpuError as error:
            log.warning("limit.not_set", extra={"data": {"instance": instance.id, "reason": error.message}})


def find_partition(devices: Iterable[Device], device_id: str, partition_id: str) -> tuple[Device, Partition]:
    for device in devices:
        if device.id == device_id and (partition := device.partition(partition_id)) is not None:
            return device, partition
    raise HardwareFailed(f"{partition_id} is gone", hint="The layout of the device changed; apply the stack again.")
