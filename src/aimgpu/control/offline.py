"""The GPUs of this machine as commands see them: read here, with what a daemon granted where one runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aimgpu.control.effects import REAL
from aimgpu.control.snapshots import foreign_bytes, process_owners_of, this_node
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.domain import DeviceUsage
from aimgpu.engines.protocols import Launcher
from aimgpu.hardware.protocols import Finding, Hardware, HelperProcesses
from aimgpu.isolation.protocols import Isolator
from aimgpu.ledger import read_grants
from aimgpu.placement import DeviceState, Snapshot

NODE = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Without a daemon, `snapshot` has the grants of models that a killed one left running."""

    hardware: Hardware
    snapshot: Snapshot
    usage: Mapping[str, DeviceUsage]  # by device id
    owners: Mapping[int, str]  # instance by pid, for processes of ours
    daemon: bool
    helpers: frozenset[int] = frozenset()  # pids of ours that serve several instances: MPS
    findings: tuple[Finding, ...] = ()  # what is wrong with GPUs of this machine
    choice: GpuChoice | None = None  # as asked for

    @property
    def states(self) -> list[DeviceState]:
        """The GPUs, by index."""
        return sorted((state for _, state in self.snapshot.devices()), key=lambda state: state.device.index)

    @property
    def stranded(self) -> list[str]:
        """Instances that run although their daemon is gone."""
        return [] if self.daemon else sorted(set(self.owners.values()))

    @property
    def simulated(self) -> bool:
        """Whether any of the GPUs is simulated."""
        return any(state.device.simulated for state in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSources:
    """The concrete things that a machine is read with."""

    hardware: Hardware
    launchers: Callable[[], Mapping[str, Launcher]]  # made only where a GPU has processes
    isolator: Callable[[], Isolator]
    helpers: HelperProcesses
    ledger_file: Path


def read_machine(sources: MachineSources, *, granted: Snapshot | None, choice: GpuChoice | None = None) -> Machine:
    """`granted`: the snapshot of the daemon that runs here; None: there is none, and the ledger it left is looked at."""
    usage = {item.device_id: item for item in sources.hardware.read_usage()}
    owners = _owners(sources, usage)
    return Machine(
        hardware=sources.hardware,
        snapshot=granted or _look(sources, usage, owners),
        usage=usage,
        owners=owners,
        daemon=granted is not None,
        helpers=frozenset(sources.helpers.pids()),
        findings=tuple(sources.hardware.inspect()),
        choice=choice,
    )


def _look(sources: MachineSources, usage: Mapping[str, DeviceUsage], owners: Mapping[int, str]) -> Snapshot:
    levels = sources.isolator().available_levels
    alive = set(owners.values())
    found = read_grants(sources.ledger_file) if alive else ()
    grants = tuple(grant for grant in found if grant.instance_id in alive)
    states = tuple(
        DeviceState(
            device=device,
            grants=(here := tuple(grant for grant in grants if grant.device_id == device.id)),
            foreign_bytes=foreign_bytes(device, usage.get(device.id), here, frozenset(owners)),
            shared_levels={part.id: levels(device, part, exclusive=False) for part in device.layout.partitions},
            exclusive_levels={part.id: levels(device, part, exclusive=True) for part in device.layout.partitions},
        )
        for device in sources.hardware.read_devices()
    )
    return Snapshot(nodes=(this_node(NODE, states),))


def _owners(sources: MachineSources, usage: Mapping[str, DeviceUsage]) -> dict[int, str]:
    """Instances by the pids of their processes and of everything below them; looked for only where a GPU has processes."""
    if not any(item.processes for item in usage.values()):
        return {}
    started = [found for launcher in sources.launchers().values() for found in launcher.find_started().items()]
    return process_owners_of(REAL, {process.pid: instance_id for instance_id, process in started})
