"""The GPUs of this machine as commands see them: read here, with what the daemon granted where one runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from aimgpu.cli.client import connect
from aimgpu.control.snapshots import foreign_bytes, this_node
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.domain import DeviceUsage
from aimgpu.hardware.protocols import Finding, Hardware
from aimgpu.home import Home
from aimgpu.ledger import read_grants
from aimgpu.placement import DeviceState, Snapshot, snapshot_from_json
from aimgpu.wiring import choose_hardware, make_isolator, make_launchers, make_mps, reopen_hardware

NODE = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Without a daemon, `snapshot` knows the grants of models that a killed one left running."""

    hardware: Hardware
    snapshot: Snapshot
    usage: Mapping[str, DeviceUsage]  # by Device id
    owners: Mapping[int, str]  # instance by pid, for processes of ours
    daemon: bool
    attendants: frozenset[int] = frozenset()  # pids of ours that serve several instances: MPS
    findings: tuple[Finding, ...] = ()  # what is wrong with GPUs of this machine
    choice: GpuChoice | None = None  # as asked for

    @property
    def states(self) -> list[DeviceState]:
        return sorted((state for _, state in self.snapshot.devices()), key=lambda state: state.device.index)

    @property
    def stranded(self) -> list[str]:
        """Instances that run although their daemon is gone."""
        return [] if self.daemon else sorted(set(self.owners.values()))

    @property
    def simulated(self) -> bool:
        return any(state.device.simulated for state in self.states)


def read_machine(home: Home, simulated: GpuChoice | None = None) -> Machine:
    """With `simulated`, GPUs that are asked for by name, whatever runs here."""
    if simulated is None and home.read_daemon() is not None:
        snapshot = snapshot_from_json(connect(home).read_snapshot())
        hardware = reopen_hardware([state.device for _, state in snapshot.devices()], home)
        usage = {item.device_id: item for item in hardware.read_usage()}
        return Machine(
            hardware=hardware,
            snapshot=snapshot,
            usage=usage,
            owners=_owners(home, usage),
            daemon=True,
            attendants=make_mps(home).pids(),
            findings=hardware.inspect(),
        )
    hardware = choose_hardware(simulated or GpuChoice(), home)
    usage = {item.device_id: item for item in hardware.read_usage()}
    owners = _owners(home, usage)
    return Machine(
        hardware=hardware,
        snapshot=_look(home, hardware, usage, owners),
        usage=usage,
        owners=owners,
        daemon=False,
        attendants=make_mps(home).pids(),
        findings=hardware.inspect(),
        choice=simulated,
    )


def _look(home: Home, hardware: Hardware, usage: Mapping[str, DeviceUsage], owners: Mapping[int, str]) -> Snapshot:
    levels = make_isolator(home).available_levels
    alive = set(owners.values())
    grants = tuple(grant for grant in (read_grants(home.ledger_file) if alive else ()) if grant.instance_id in alive)
    states = tuple(
        DeviceState(
            device=device,
            grants=(here := tuple(grant for grant in grants if grant.device_id == device.id)),
            foreign_bytes=foreign_bytes(device, usage.get(device.id), here, frozenset(owners)),
            shared_levels={part.id: levels(device, part, exclusive=False) for part in device.layout.partitions},
            exclusive_levels={part.id: levels(device, part, exclusive=True) for part in device.layout.partitions},
        )
        for device in hardware.read_devices()
    )
    return Snapshot(nodes=(this_node(NODE, states),))


def _owners(home: Home, usage: Mapping[str, DeviceUsage]) -> dict[int, str]:
    """Instances by the pids of their processes and of everything below them; looked for only where a GPU has processes."""
    if not any(item.processes for item in usage.values()):
        return {}
    found: dict[int, str] = {}
    for launcher in make_launchers(home).values():
        for instance_id, process in launcher.find_started().items():
            found |= dict.fromkeys(_family(process.pid), instance_id)
    return found


def _family(pid: int) -> Iterable[int]:
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.Error:
        return [pid]
