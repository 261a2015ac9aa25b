"""The real daemon as the page's tests want it: real sizing, engines that stream words, and simulated GPUs that measure.

AIMGPU_TEST_ENGINES: JSON, deployment -> flags of fake_engine.py. AIMGPU_TEST_TIMING: JSON, fields of Timing.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from tests.programs.engine import ScriptedEngine

from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.deployment_sizer import DeploymentSizer
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.daemon.assembly import main
from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Partition
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.hardware.protocols import Finding, Hardware, Identity
from aimgpu.home import Home
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger

_USED_PERCENT = 88


class MeasuringGpus:
    """Simulated GPUs that report memory: what an instance was granted, less some, under the pid that holds it."""

    def __init__(self, inner: Hardware, ledger: Ledger) -> None:
        self._inner = inner
        self._ledger = ledger

    def read_devices(self) -> tuple[Device, ...]:
        return self._inner.read_devices()

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        return tuple(self._measured(usage) for usage in self._inner.read_usage())

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        return self._inner.apply_layout(device_id, layout_name, reload_driver=reload_driver)

    def identify(self, device: Device, partition: Partition) -> Identity:
        return self._inner.identify(device, partition)

    def inspect(self) -> tuple[Finding, ...]:
        return self._inner.inspect()

    def _measured(self, usage: DeviceUsage) -> DeviceUsage:
        ours = [
            ForeignProcess(
                pid=instance.process.pid,
                name="engine",
                memory_bytes=grant.memory_bytes * _USED_PERCENT // 100,
                partition_id=grant.partition_id,
            )
            for instance in self._ledger.instances()
            if instance.process is not None
            for grant in instance.grants
            if grant.device_id == usage.device_id
        ]
        known = {process.pid for process in ours}
        others = [one for one in usage.processes if one.memory_bytes is not None and one.pid not in known]
        by_partition: dict[str, int] = {}
        for process in (*ours, *others):
            if process.partition_id is not None:
                by_partition[process.partition_id] = by_partition.get(process.partition_id, 0) + (process.memory_bytes or 0)
        return replace(
            usage,
            used_bytes=sum(one.memory_bytes or 0 for one in (*ours, *others)),
            used_bytes_by_partition=by_partition,
            processes=(*ours, *others),
            utilization_percent=min(99, 12 + 17 * len(ours)) if ours else 0,
        )


def make_dependencies(home: Home, hardware: Hardware, in_flight: Callable[[str], int]) -> Dependencies:
    flags = json.loads(os.environ.get("AIMGPU_TEST_ENGINES", "{}"))
    timing = json.loads(os.environ.get("AIMGPU_TEST_TIMING", "{}"))
    by_deployment = {name: tuple(given) for name, given in flags.items()}
    usual = ("--first-token-seconds", "0.05", "--token-seconds", "0.02", "--tokens", "64")
    engines = {name: ScriptedEngine(name, flags=usual, by_deployment=by_deployment) for name in ("vllm", "llamacpp")}
    ledger = Ledger.open(home.path / "ledger.sqlite3")
    gpus = MeasuringGpus(hardware, ledger)
    return Dependencies(
        hardware=gpus,
        ledger=ledger,
        isolator=MechanismChooser(),
        engines=engines,
        launchers={"process": ProcessLauncher(home.path)},
        models=LocalModelStore(home.path / "models"),
        size=DeploymentSizer(
            catalogue=CatalogueFile(home.catalogue_file),
            measurements=MeasurementFile(home.measurements_file),
            devices=gpus,
            engines=engines,
        ),
        runs=home.path / "runs",
        node=socket.gethostname(),
        in_flight=in_flight,
        timing=Timing(**timing),
    )


if __name__ == "__main__":
    sys.exit(main(make_dependencies))
