"""Tenants of the demo: charged in a ledger, limited by the interposer, started as processes, and found again after a crash.

`python -m aimgpu.cli.demo.manager FOLDER GPU NAME=BYTES ...` starts tenants and waits: the scene of a crash kills it.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from aimgpu import procfs, wiring
from aimgpu.domain import (
    Device,
    DeviceUsage,
    Grant,
    Instance,
    InstanceState,
    Level,
    Partition,
    Priority,
    ProcessIdentity,
    Vendor,
)
from aimgpu.errors import AimGpuError, HardwareFailed
from aimgpu.hardware.protocols import Hardware
from aimgpu.isolation.interposer import Interposer
from aimgpu.ledger import Ledger, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoShare:
    """What a tenant gets."""

    memory_bytes: int
    priority: Priority = Priority.MEDIUM
    compute_ppm: int | None = None


class DemoTenant:
    """One process that uses the GPU."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def answer(self) -> dict[str, Any]:
        """The next line that it prints. Raises HardwareFailed where it could not do its work."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        found: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with status {self.process.wait()}"}
        if "error" in found:
            raise HardwareFailed(f"a tenant of the demo could not run: {found['error']}")
        return found

    def end(self) -> None:
        """Close its input, which ends it, and wait."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait()


class DemoManager:
    """Owns the ledger of one folder, as the daemon does."""

    def __init__(self, folder: Path, hardware: Hardware, ledger: Ledger, owner: Owner) -> None:
        self.folder = folder
        self.hardware = hardware
        self.ledger = ledger
        self._owner = owner
        self.outlived = False  # its tenants end with it
        self.interposer = Interposer(folder / "regions" / "own")

    @classmethod
    def open(cls, folder: Path, hardware: Hardware) -> Self:
        """Raises LedgerOwned while another one lives."""
        owner = Owner.acquire(folder)
        return cls(folder, hardware, Ledger.open(folder / "ledger.db"), owner)

    def close(self) -> None:
        """Another one may open the folder."""
        self.ledger.close()
        self._owner.release()

    def device(self) -> Device:
        """The first GPU, as it is now."""
        return self.hardware.read_devices()[0]

    def usage(self) -> DeviceUsage:
        """What its driver measures."""
        wanted = self.device().id
        return next(usage for usage in self.hardware.read_usage() if usage.device_id == wanted)

    def measured(self, pid: int, before: DeviceUsage) -> int:
        """Bytes that the driver counts for a process; of the GPU since `before` where it lists other pids (containers)."""
        usage = self.usage()
        own = next((one.memory_bytes for one in usage.processes if one.pid == pid), None)
        return own if own is not None else (usage.used_bytes or 0) - (before.used_bytes or 0)

    def start(self, name: str, share: DemoShare, *program: object, partition: Partition | None = None) -> DemoTenant:
        """Charge a share, prepare its limits, and start a program in it."""
        device = self.device()
        partition = partition or device.layout.partitions[0]
        grant = Grant(
            id=f"{name}/{uuid.uuid4().hex[:8]}",
            instance_id=name,
            deployment=name,
            node="here",
            device_id=device.id,
            partition_id=partition.id,
            memory_bytes=share.memory_bytes,
            compute_ppm=share.compute_ppm,
            priority=share.priority,
            level=Level.RUNTIME,
            mechanisms=(self.interposer.name,),
        )
        instance = Instance(
            id=name,
            deployment=name,
            replica=0,
            model="program",
            engine="program",
            launcher="process",
            state=InstanceState.LOADING,
            grants=(grant,),
        )
        sizes = {each.id: each.memory_bytes for each in device.layout.partitions}
        self.ledger.charge(instance, capacity=sizes)
        environment = {
            **os.environ,
            **self.hardware.identify(device, partition).environment,
            **self.interposer.enforce(grant, device, partition).environment,
        }
        tenant = DemoTenant(_start_program(device, environment, program, outlives=self.outlived))
        ticks = procfs.read_start_ticks(tenant.process.pid) or 0
        identity = ProcessIdentity(pid=tenant.process.pid, start_ticks=ticks, boot_id=procfs.read_boot_id())
        self.ledger.update(replace(instance, state=InstanceState.READY, process=identity))
        return tenant

    def release(self, name: str) -> None:
        """Take back a share whose process is gone."""
        for grant in self.ledger.release(name):
            self.interposer.release(grant)

    def reconcile(self) -> tuple[list[str], list[str]]:
        """After a crash: live processes keep their shares, those of dead ones are released. Returns both."""
        kept: list[str] = []
        gone: list[str] = []
        for instance in self.ledger.instances():
            alive = instance.process is not None and procfs.is_running(instance.process)
            (kept if alive else gone).append(instance.id)
            if not alive:
                self.release(instance.id)
        return kept, gone

    def await_idle(self) -> DeviceUsage:
        """The driver's figures once it lists no process; a real driver may take a moment to clean up."""
        return self._await(lambda usage: not usage.processes)

    def await_unlisted(self, pids: Collection[int]) -> DeviceUsage:
        """The driver's figures once it lists none of these ended processes."""
        return self._await(lambda usage: not any(one.pid in pids for one in usage.processes))

    def _await(self, settled: Callable[[DeviceUsage], bool], seconds: float = 10.0) -> DeviceUsage:
        end = time.monotonic() + seconds
        while not settled(usage := self.usage()) and time.monotonic() < end:
            time.sleep(0.05)
        return usage


def _start_program(
    device: Device, environment: Mapping[str, str], program: tuple[object, ...], *, outlives: bool
) -> "subprocess.Popen[str]":
    api = "cuda" if device.vendor is Vendor.NVIDIA else "hip"
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "aimgpu.isolation.probe", api, *map(str, program)],
        env=dict(environment),
        text=True,
        stdin=None if outlives else subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def main(arguments: list[str]) -> int:
    """Start tenants that fill their shares, print their pids, and wait to be killed."""
    folder, gpu, *shares = arguments
    manager = DemoManager.open(Path(folder), wiring.demo_hardware(None if gpu == "real" else gpu, Path(folder)))
    manager.outlived = True  # as the engines of the daemon outlive it
    started = []
    for text in shares:
        name, _, size = text.partition("=")
        tenant = manager.start(name, DemoShare(memory_bytes=int(size)), "fill", size)
        started.append((name, tenant, tenant.answer()["held_bytes"]))
    told = [{"name": name, "pid": tenant.process.pid, "held_bytes": held} for name, tenant, held in started]
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AimGpuError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(1)
