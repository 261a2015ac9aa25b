"""The GPUs of this machine for commands: read with the concrete backends, or asked of the daemon that runs."""

from aimgpu.cli.client import connect
from aimgpu.control.offline import NODE, Machine, MachineSources
from aimgpu.control.offline import read_machine as read_with
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.hardware.protocols import Hardware
from aimgpu.home import Home
from aimgpu.placement import snapshot_from_json
from aimgpu.wiring import choose_hardware, make_isolator, make_launchers, make_mps, reopen_hardware

__all__ = ["NODE", "Machine", "read_machine"]


def read_machine(home: Home, simulated: GpuChoice | None = None) -> Machine:
    """With `simulated`, GPUs that are asked for by name, whatever runs here."""
    if simulated is None and home.read_daemon() is not None:
        snapshot = snapshot_from_json(connect(home).read_snapshot())
        hardware = reopen_hardware([state.device for _, state in snapshot.devices()], home)
        return read_with(_sources(home, hardware), granted=snapshot)
    hardware = choose_hardware(simulated or GpuChoice(), home)
    return read_with(_sources(home, hardware), granted=None, choice=simulated)


def _sources(home: Home, hardware: Hardware) -> MachineSources:
    return MachineSources(
        hardware=hardware,
        launchers=lambda: make_launchers(home),
        isolator=lambda: make_isolator(home),
        helpers=make_mps(home),
        ledger_file=home.ledger_file,
    )
