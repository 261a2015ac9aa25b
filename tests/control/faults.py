"""A machine on which the nth effect of an operation fails: a write of the ledger, a start, a stop, a sleep, a layout."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.control.world import FAST, FakeEngine, FakeLauncher, FakeSleeper, Machine, boot

from aimgpu.control.controller import Controller
from aimgpu.domain import Device, ProcessIdentity
from aimgpu.engines.protocols import Command, LaunchRequest
from aimgpu.errors import AimGpuError, EngineFailed, HardwareFailed, LedgerFailed
from aimgpu.hardware.simulated import SimulatedHardware

WRITES = frozenset(
    {"want", "unwant", "update", "charge", "rebook", "resize", "note_enforcement", "release", "begin", "finish", "forget"}
)
TIMING = replace(FAST, load_timeout_seconds=60.0, restart_limit=3)


@dataclass
class Faults:
    """Counts effects while it is armed; the one with the number `fails_at` raises instead of happening."""

    fails_at: int | None = None
    armed: bool = False
    sites: list[str] = field(default_factory=list)  # in the order in which they came
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_by(self, site: str, error: Callable[[str], AimGpuError]) -> None:
        """Called before an effect."""
        with self.lock:
            if not self.armed:
                return
            self.sites.append(site)
            fails = len(self.sites) - 1 == self.fails_at
        if fails:
            raise error(f"{site} failed, as told")

    @property
    def struck(self) -> bool:
        """Whether the effect that was to fail came at all."""
        return self.fails_at is not None and len(self.sites) > self.fails_at


class FailingLedger:
    """Writes nothing where it fails: a transaction is whole or not at all."""

    def __init__(self, ledger: Any, faults: Faults) -> None:
        self._ledger = ledger
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._ledger, name)
        if name not in WRITES:
            return target

        def around(*args: Any, **kwargs: Any) -> Any:
            self._faults.pass_by(f"ledger.{name}", LedgerFailed)
            return target(*args, **kwargs)

        return around


class FailingLauncher(FakeLauncher):
    def __init__(self, machine: Machine, faults: Faults) -> None:
        super().__init__(machine)
        self._faults = faults

    def start(self, instance_id: str, command: Command, run_directory: Path) -> ProcessIdentity:
        self._faults.pass_by("launcher.start", EngineFailed)
        return super().start(instance_id, command, run_directory)

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        self._faults.pass_by("launcher.stop", EngineFailed)
        super().stop(process, grace_seconds=grace_seconds)


class FailingEngine(FakeEngine):
    def __init__(self, machine: Machine, faults: Faults) -> None:
        super().__init__(machine)
        self._faults = faults

    def command(self, request: LaunchRequest) -> Command:
        self._faults.pass_by("engine.command", EngineFailed)
        return super().command(request)


class FailingSleeper(FakeSleeper):
    def __init__(self, machine: Machine, faults: Faults) -> None:
        super().__init__(machine)
        self._faults = faults

    def command(self, request: LaunchRequest) -> Command:
        self._faults.pass_by("engine.command", EngineFailed)
        return super().command(request)

    def sleep(self, run_directory: Path, api_key: str, *, deep: bool = False) -> None:
        self._faults.pass_by("engine.sleep", EngineFailed)
        super().sleep(run_directory, api_key, deep=deep)

    def wake(self, run_directory: Path, api_key: str) -> None:
        self._faults.pass_by("engine.wake", EngineFailed)
        super().wake(run_directory, api_key)


class FailingHardware(SimulatedHardware):
    def __init__(self, gpus: int, state: Path, faults: Faults) -> None:
        super().__init__([("MI300X", gpus)], state)
        self._faults = faults

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        self._faults.pass_by("hardware.apply_layout", HardwareFailed)
        return super().apply_layout(device_id, layout_name, reload_driver=reload_driver)


def boot_failing(machine: Machine, faults: Faults) -> Controller:
    """A controller whose effects fail as `faults` has it; the machine under it is the same as for `world.boot`."""
    machine.hardware = FailingHardware(machine.gpus, machine.root / "simulated.json", faults)
    made = boot(machine, timing=TIMING)._dependencies
    ledger: Any = FailingLedger(made.ledger, faults)
    engines = {"llamacpp": FailingEngine(machine, faults), "sleeper": FailingSleeper(machine, faults)}
    return Controller(replace(made, ledger=ledger, engines=engines, launchers={"process": FailingLauncher(machine, faults)}))
