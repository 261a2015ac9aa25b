"""`aimgpu doctor --verify`: this machine's GPUs tried for real, and a report that can be sent in."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from aimgpu import wiring
from aimgpu.domain import Device, Grant, Layout, Level, Partition, Priority, Vendor
from aimgpu.errors import AimGpuError, NotAllowed, PartitionBusy, UnknownLayout
from aimgpu.hardware.amd.recording import record_amd
from aimgpu.hardware.nvidia.recording import record_nvidia
from aimgpu.hardware.protocols import Hardware
from aimgpu.home import Home
from aimgpu.isolation.building import find_interposer, find_loader
from aimgpu.isolation.cu_masks import CuMasks
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.isolation.probe import SPIN_NANOSECONDS
from aimgpu.kubernetes.node.layout_rights import LayoutRights, read_limits
from aimgpu.units import GIB, MIB, PPM, format_bytes, format_ppm

if TYPE_CHECKING:
    from aimgpu.isolation.protocols import Mechanism

FORMAT = 1
_CAP_BYTES, _BELOW_BYTES, _ABOVE_BYTES = 2 * GIB, 512 * MIB, 3 * GIB
_SHARE_PPM, _SHARE_TOLERANCE_PPM = 300_000, 100_000
_PROGRAMS = ("memory cap", "compute gate", "sharing")
_WORK_SECONDS = 3.0
_PROBE_SECONDS = 60.0


class Outcome(StrEnum):
    """How a trial ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One thing that was tried on one GPU."""

    gpu: str  # "gpu0"; ids that identify the machine stay out of the report
    what: str
    outcome: Outcome
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """`real` is False where everything ran on a simulation."""

    real: bool
    gpus: tuple[str, ...]
    changed_layouts: bool
    trials: tuple[Trial, ...]
    recordings: tuple[dict[str, Any], ...] = field(default=())

    @property
    def failed(self) -> int:
        """How many trials failed."""
        return sum(trial.outcome is Outcome.FAILED for trial in self.trials)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "VerifyReport":
        """Of another machine."""
        trials = tuple(Trial(**{**one, "outcome": Outcome(one["outcome"])}) for one in found["trials"])
        own = {name: found[name] for name in ("real", "changed_layouts")}
        return cls(**own, gpus=tuple(found["gpus"]), trials=trials, recordings=tuple(found["recordings"]))

    def to_json(self) -> dict[str, Any]:
        """What is written, to be sent in."""
        now = datetime.now(tz=UTC).replace(microsecond=0).isoformat()
        return {"format": FORMAT, "date": now, "kernel": os.uname().release, **asdict(self)}


def verify(hardware: Hardware, *, change_layouts: bool = False, sysfs: Path | None = None) -> VerifyReport:
    """Try every GPU of this machine. Only `change_layouts` changes anything, and what it changes is restored.

    `sysfs`: where a node agent writes layouts; what else such an agent needs is tried too, and no program on a GPU in use.
    """
    devices = hardware.read_devices()
    trials: list[Trial] = []
    for device in devices:
        found = chain(
            _try_device(hardware, device, change_layouts=change_layouts, spare=sysfs is not None),
            _try_mechanisms(hardware, device) if sysfs is not None else (),
        )
        for what, outcome, text in found:
            hidden = text.replace(device.id, f"gpu{device.index}")
            trials.append(Trial(gpu=f"gpu{device.index}", what=what, outcome=outcome, text=hidden))
    if sysfs is not None:
        simulated = all(device.simulated for device in devices)
        trials += [Trial(gpu="node", what=what, outcome=one, text=text) for what, one, text in _try_node(sysfs, simulated)]
    real = any(not device.simulated for device in devices)
    recordings = tuple(found for found in (record_amd(), record_nvidia()) if found is not None) if real else ()
    return VerifyReport(
        real=real,
        gpus=tuple(device.market_name or device.product for device in devices),
        changed_layouts=change_layouts,
        trials=tuple(trials),
        recordings=recordings,
    )


_Found = tuple[str, Outcome, str]


def _try_node(sysfs: Path, simulated: bool) -> Iterator[_Found]:
    limits = read_limits(LayoutRights.MEMORY, sysfs, real=not simulated)
    for what, reason in (("compute modes", limits.compute), ("memory modes", limits.memory)):
        yield f"right to {what}", Outcome.SKIPPED if reason else Outcome.PASSED, reason or "nothing is missing"
    try:
        library = find_interposer()
        done = subprocess.run([find_loader(), library], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603
        loads, text = done.returncode == 0, done.stderr.strip() or "the interposer loads"
    except (AimGpuError, OSError) as error:
        loads, text = False, str(error)
    yield "preload", Outcome.PASSED if loads else Outcome.FAILED, text


def _try_mechanisms(hardware: Hardware, device: Device) -> Iterator[_Found]:
    """What each mechanism would give on the GPU as it is, and whether its device nodes open."""
    partition = next(iter(device.layout.partitions), None)
    if partition is None:
        return
    with TemporaryDirectory(prefix="aimgpu-verify-") as folder:
        for name, offer in wiring.explain_isolation(Home(Path(folder)), device, partition):
            outcome = Outcome.SKIPPED if offer.level is None else Outcome.PASSED
            yield f"offer of {name}", outcome, offer.reason or f"level {offer.level}"
    if device.simulated:
        return
    try:
        nodes = hardware.identify(device, partition).device_nodes
        for node in nodes:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        yield "device nodes", Outcome.PASSED, f"opened {', '.join(nodes)}"
    except (AimGpuError, OSError) as error:
        yield "device nodes", Outcome.FAILED, str(error)


def _try_device(hardware: Hardware, device: Device, *, change_layouts: bool, spare: bool) -> Iterator[_Found]:
    yield from _reading(hardware, device)
    yield from _layouts(hardware, device, change_layouts=change_layouts)
    current = next((each for each in hardware.read_devices() if each.id == device.id), device)
    if device.simulated or not current.layout.partitions:
        why = "a simulated GPU runs no program" if device.simulated else "the GPU has no partition that a program could run on"
        yield from ((what, Outcome.SKIPPED, why) for what in _PROGRAMS)
        return
    users = sum(len(usage.processes) for usage in hardware.read_usage() if usage.device_id == device.id)
    if spare and users:
        yield from (
            (what, Outcome.SKIPPED, f"{users} processes use the GPU: no program is run beside them") for what in _PROGRAMS
        )
        return
    yield from _limits(hardware, current)
    yield from _sharing(hardware, current)


def _reading(hardware: Hardware, device: Device) -> Iterator[_Found]:
    again = next((each for each in hardware.read_devices() if each.id == device.id), None)
    parts = len(device.layout.partitions)
    several = "" if parts == 1 else "s"
    read = f"{device.product}, {format_bytes(device.memory_bytes)}, {device.layout.name} with {parts} partition{several}"
    yield (
        "reading",
        Outcome.PASSED if again == device else Outcome.FAILED,
        read if again == device else "read differently twice",
    )
    usage = next((each for each in hardware.read_usage() if each.device_id == device.id), None)
    if usage is None:
        yield "usage", Outcome.FAILED, "the memory in use cannot be read"
    else:
        used = "unknown" if usage.used_bytes is None else format_bytes(usage.used_bytes)
        yield "usage", Outcome.PASSED, f"{used} in use by {len(usage.processes)} processes"
    for finding in hardware.inspect():
        if finding.subject in (None, device.id):
            yield "finding", Outcome.FAILED if finding.serious else Outcome.SKIPPED, finding.text


def _layouts(hardware: Hardware, device: Device, *, change_layouts: bool) -> Iterator[_Found]:
    names = [layout.name for layout in device.layouts]
    yield "partition modes", Outcome.PASSED, f"{device.layout.name} now; reports {', '.join(names[:12])}"
    try:
        hardware.apply_layout(device.id, "NO/SUCH")
        yield "unknown mode", Outcome.FAILED, "a mode that does not exist was accepted"
    except UnknownLayout as error:
        yield "unknown mode", Outcome.PASSED, f"refused: {error.message}"
    except AimGpuError as error:
        yield "unknown mode", Outcome.FAILED, f"refused with another error: {error.message}"
    others = [each for each in device.layouts if each.name != device.layout.name]
    if not change_layouts:
        yield "changing modes", Outcome.SKIPPED, "not asked for: --change-layouts tries them and restores this one"
        return
    same_memory = [each for each in others if each.memory_mode == device.layout.memory_mode]
    if not same_memory:
        yield "changing modes", Outcome.SKIPPED, "the GPU has no other mode that needs no driver reload"
    yield from _change_and_restore(hardware, device, _different_kinds(same_memory))


def _different_kinds(layouts: Iterable[Layout]) -> list[Layout]:
    """Layouts until every kind of partition was there: a GPU with MIG has dozens that combine the same few kinds."""
    seen, chosen = set[str](), list[Layout]()
    for layout in layouts:
        kinds = {partition.kind for partition in layout.partitions}
        if not kinds <= seen:
            seen |= kinds
            chosen.append(layout)
    return chosen


def _change_and_restore(hardware: Hardware, device: Device, layouts: Iterable[Layout]) -> Iterator[_Found]:
    try:
        for layout in layouts:
            try:
                after = hardware.apply_layout(device.id, layout.name)
            except (PartitionBusy, NotAllowed) as error:
                yield f"mode {layout.name}", Outcome.SKIPPED, error.message
            except AimGpuError as error:
                yield f"mode {layout.name}", Outcome.FAILED, error.message
            else:
                same = after.layout.name == layout.name and len(after.layout.partitions) == len(layout.partitions)
                text = f"{len(after.layout.partitions)} partitions read back"
                yield f"mode {layout.name}", Outcome.PASSED if same else Outcome.FAILED, text
    finally:
        now = next((each for each in hardware.read_devices() if each.id == device.id), None)
        if now is not None and now.layout.name != device.layout.name:
            hardware.apply_layout(device.id, device.layout.name)
    now = next(each for each in hardware.read_devices() if each.id == device.id)
    restored = now.layout.name == device.layout.name
    yield (
        "restored",
        Outcome.PASSED if restored else Outcome.FAILED,
        f"{now.layout.name} as before" if restored else "not restored",
    )


def _limits(hardware: Hardware, device: Device) -> Iterator[_Found]:
    """A memory cap and a compute limit by the interposer, kept by a real program."""
    partition = device.layout.partitions[0]
    with TemporaryDirectory(prefix="aimgpu-verify-") as folder:
        interposer = Interposer(Path(folder))
        offer = interposer.offer(device, partition, exclusive=False)
        if offer.level is None:
            yield from ((what, Outcome.SKIPPED, str(offer.reason)) for what in ("memory cap", "compute gate"))
            return
        try:
            plain = dict(hardware.identify(device, partition).environment)
            grant = _grant(device, partition)
            held = plain | dict(interposer.enforce(grant, device, partition).environment)
        except AimGpuError as error:
            yield from ((what, Outcome.SKIPPED, error.message) for what in ("memory cap", "compute gate"))
            return
        yield _try_cap(device, held)
        yield _try_gate(device, plain, held)


def _try_cap(device: Device, held: dict[str, str], name: str = "memory cap") -> _Found:
    below, above = (probe(device, "allocate", size, held) for size in (_BELOW_BYTES, _ABOVE_BYTES))
    if "error" in below or "error" in above:
        return name, Outcome.SKIPPED, str(below.get("error") or above.get("error"))
    kept = below["allocated"] and not above["allocated"]
    sizes = f"{format_bytes(_BELOW_BYTES)} {_gave(below)}, {format_bytes(_ABOVE_BYTES)} {_gave(above)}"
    return name, Outcome.PASSED if kept else Outcome.FAILED, f"under a cap of {format_bytes(_CAP_BYTES)}: {sizes}"


def _gave(answer: dict[str, Any]) -> str:
    return "was allocated" if answer["allocated"] else "was refused"


def _try_gate(device: Device, plain: dict[str, str], held: dict[str, str]) -> _Found:
    free, limited = (probe(device, "work", _WORK_SECONDS, environment) for environment in (plain, held))
    if "error" in free or "error" in limited:
        return "compute gate", Outcome.SKIPPED, str(free.get("error") or limited.get("error"))
    busy, alone = (_busy_ppm(each["launches"]) for each in (limited, free))
    kept = 0 < busy <= _SHARE_PPM + _SHARE_TOLERANCE_PPM
    text = f"{format_ppm(busy)} of the GPU's time under a limit of {format_ppm(_SHARE_PPM)}, {format_ppm(alone)} without"
    return "compute gate", Outcome.PASSED if kept else Outcome.FAILED, text


def _busy_ppm(launches: int) -> int:
    """The part of the time that kernels ran, to a tenth of a percent."""
    return int(round(min(launches * SPIN_NANOSECONDS / (_WORK_SECONDS * 1e9), 1.0) * PPM, -3))


def _sharing(hardware: Hardware, device: Device) -> Iterator[_Found]:
    """What shares compute below the interposer: MPS or CU masks, each with a program started under it."""
    partition = device.layout.partitions[0]
    with TemporaryDirectory(prefix="aimgpu-verify-") as folder:
        mps = wiring.make_mps(Home(Path(folder)))
        nvidia = device.vendor is Vendor.NVIDIA
        mechanism: Mechanism = MpsMechanism(mps) if nvidia else CuMasks(Path(folder) / "cu-masks.json")
        name = "MPS" if nvidia else "CU mask"
        offer = mechanism.offer(device, partition, exclusive=False)
        if offer.level is None:
            yield name, Outcome.SKIPPED, str(offer.reason)
            return
        try:
            plain = dict(hardware.identify(device, partition).environment)
            held = plain | dict(mechanism.enforce(_grant(device, partition), device, partition).environment)
            yield _try_cap(device, held, name) if nvidia else _try_start(device, held, name)
        except AimGpuError as error:
            yield name, Outcome.FAILED, error.message
        finally:
            mps.dismiss([partition.uuid] if nvidia and partition.uuid else [])


def _try_start(device: Device, held: dict[str, str], name: str) -> _Found:
    answer = probe(device, "allocate", _BELOW_BYTES, held)
    if "error" in answer:
        return name, Outcome.SKIPPED, str(answer["error"])
    return (
        name,
        Outcome.PASSED if answer["allocated"] else Outcome.FAILED,
        f"a program under HSA_CU_MASK={held['HSA_CU_MASK']} ran",
    )


def _grant(device: Device, partition: Partition) -> Grant:
    return Grant(
        id="verify/0",
        instance_id="verify",
        deployment="verify",
        node="here",
        device_id=device.id,
        partition_id=partition.id,
        memory_bytes=_CAP_BYTES,
        compute_ppm=_SHARE_PPM,
        priority=Priority.MEDIUM,
        level=Level.RUNTIME,
    )


def probe(device: Device, what: str, amount: float, environment: dict[str, str]) -> dict[str, Any]:
    """What the probe program answers under this environment; `error` where it could not do it at all."""
    api = "cuda" if device.vendor is Vendor.NVIDIA else "hip"
    command = [sys.executable, "-m", "aimgpu.isolation.probe", api, what, str(amount)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"the program did not end within {_PROBE_SECONDS:g} s"}
    except (ValueError, IndexError):
        return {"error": f"the program ended with status {done.returncode}: {done.stderr.strip()[-200:]}"}
    return answer
