"""What is wrong with the node's GPUs, and who uses them without a grant."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aimgpu.domain import Device, DeviceUsage
from aimgpu.hardware.protocols import Finding

PROC = Path("/proc")
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


@dataclass(slots=True)
class Inventory:
    """GPUs as last read; one that disappears is remembered, so that its claims can be marked."""

    known: dict[str, Device] = field(default_factory=dict)

    def update(self, devices: Iterable[Device], findings: Iterable[Finding]) -> dict[str, str]:
        """GPUs that must not be used, with the reason."""
        present = {device.id: device for device in devices}
        self.known |= present
        unhealthy = {name: "the GPU is not there any more" for name in self.known if name not in present}
        for finding in findings:
            if finding.serious and finding.subject is not None:
                for device_id in self._named(finding.subject):
                    unhealthy.setdefault(device_id, finding.text)
        return unhealthy

    def _named(self, subject: str) -> list[str]:
        return [name for name in self.known if name == subject or subject in name]


def foreign_devices(usages: Iterable[DeviceUsage], pods: Collection[str], proc: Path = PROC) -> dict[str, list[int]]:
    """GPUs that processes outside of these pods use. Pods are known by the control group of their processes."""
    found: dict[str, list[int]] = {}
    for usage in usages:
        strangers = [process.pid for process in usage.processes if read_pod(process.pid, proc) not in pods]
        if strangers:
            found[usage.device_id] = strangers
    return found


def read_pod(pid: int, proc: Path = PROC) -> str | None:
    """The uid of the pod that a process belongs to; None: it is in no pod, or gone."""
    try:
        match = _POD.search((proc / str(pid) / "cgroup").read_text())
    except OSError:
        return None
    return None if match is None else match[1].replace("_", "-")


def processes_of_pods(pods: Collection[str], proc: Path = PROC) -> Mapping[str, frozenset[int]]:
    """All processes of these pods, by pod."""
    found: dict[str, set[int]] = {pod: set() for pod in pods}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (pod := read_pod(int(entry.name), proc)) in found:
            found[pod].add(int(entry.name))
    return {pod: frozenset(pids) for pod, pids in found.items()}
