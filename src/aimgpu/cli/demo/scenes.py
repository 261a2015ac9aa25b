"""The scenes of `aimgpu demo`: each does one thing with real processes, and judges it by what others measured."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aimgpu import procfs, wiring
from aimgpu.cli.demo.manager import DemoManager, DemoShare, DemoTenant
from aimgpu.domain import Device, Layout, Partition, Priority
from aimgpu.errors import HardwareFailed, PartitionBusy
from aimgpu.isolation.probe import HOG_NANOSECONDS, STEP_NANOSECONDS, STEPS
from aimgpu.units import GIB, MIB, format_bytes

REQUESTS = 60  # of the model, in each of three runs
_DISTURBED = 1.2  # times alone; below this the hog disturbs too little to show the gate
_CONTEXT_ROOM = 1 * GIB  # a real driver takes memory of its own for each process


class SceneVerdict(StrEnum):
    """How a scene ended."""

    HELD = "held"
    BROKEN = "broken"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneResult:
    """What a scene showed: sentences for people, figures for programs, and who measured what."""

    verdict: SceneVerdict
    lines: tuple[str, ...]
    figures: Mapping[str, Any]
    measured_by: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One of the four."""

    name: str
    title: str
    play: "Callable[[DemoStage], SceneResult]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStage:
    """Where a scene plays."""

    manager: DemoManager
    meter: str  # who measures: "the software GPU", "NVML"
    product: str | None  # of a software GPU; None: this machine's own GPU

    @property
    def software(self) -> bool:
        """Bytes and device time are those of the software GPU."""
        return self.manager.device().software


def _judge(*held: bool) -> SceneVerdict:
    return SceneVerdict.HELD if all(held) else SceneVerdict.BROKEN


def play_cap(stage: DemoStage) -> SceneResult:
    """A tenant with a tenth of the GPU asks for all of it."""
    manager = stage.manager
    whole = manager.device().layout.partitions[0].memory_bytes
    share = whole // 10 // (2 * MIB) * (2 * MIB)
    before = manager.usage()
    with ExitStack() as stack:
        tenant = _enter(stack, manager, "greedy", DemoShare(memory_bytes=share), "fill", 10 * share)
        answer = tenant.answer()
        measured = manager.measured(tenant.process.pid, before)
        charged = next(iter(manager.interposer.read_tenants(_partition(manager)).values())).used_bytes
        held = answer["held_bytes"]
    exact = held == share and measured == share == charged
    kept = measured <= share and charged <= share and share - held <= _CONTEXT_ROOM
    asked = "refused" if not answer["at_once"] else "GRANTED"
    return SceneResult(
        verdict=_judge(not answer["at_once"], exact if stage.software else kept),
        lines=(
            f"Share {format_bytes(share)} of {format_bytes(whole)}. It asked for {format_bytes(10 * share)} at once: {asked}.",
            f"In ever smaller pieces, down to one byte, it got {held:,} bytes; its share is {share:,}.",
            f"{_capital(stage.meter)} counts {measured:,} bytes for its process ({_agreement(measured, share)}).",
        ),
        figures={"share_bytes": share, "held_bytes": held, "measured_bytes": measured, "charged_bytes": charged},
        measured_by={"held_bytes": "the tenant", "measured_bytes": stage.meter, "charged_bytes": "the interposer"},
    )


def play_gate(stage: DemoStage) -> SceneResult:
    """A model's decode loop alone, beside a hog without the gate, and beside it with the gate."""
    runs = {
        "alone": _decode(stage, hog=None),
        "gate_off": _decode(stage, hog=Priority.MEDIUM),
        "gate_on": _decode(stage, hog=Priority.LOW),
    }
    alone, off, on = (runs[name] for name in ("alone", "gate_off", "gate_on"))
    worse, kept = off["p50_ms"] / alone["p50_ms"], on["p50_ms"] / alone["p50_ms"]
    return SceneResult(
        verdict=_judge(worse > _DISTURBED, kept < (1 + worse) / 2),
        lines=(
            f"A request of {STEPS} tokens, {STEP_NANOSECONDS / 1e6:g} ms of device time each:",
            *(_speed(name, runs[key], alone) for name, key in _RUN_NAMES),
            f"The hog had {off['hog_percent']:.0f} % of the device without the gate and {on['hog_percent']:.0f} % with it."
            if off["hog_percent"] is not None and on["hog_percent"] is not None
            else f"{stage.meter} does not report the device time of a process.",
        ),
        figures=runs,
        measured_by={"p50_ms, p95_ms, tokens_per_second": "the model's process", "hog_percent": stage.meter},
    )


_RUN_NAMES = (("alone", "alone"), ("beside a hog, gate off", "gate_off"), ("beside a hog, gate on", "gate_on"))


def _speed(name: str, run: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    times = f"p50 {run['p50_ms']:6.1f} ms, p95 {run['p95_ms']:6.1f} ms, {run['tokens_per_second']:5.0f} tokens/s"
    return f"  {name:23} {times}  ({run['p50_ms'] / alone['p50_ms']:.2f} x alone)"


def _decode(stage: DemoStage, *, hog: Priority | None) -> dict[str, Any]:
    manager = stage.manager
    share = manager.device().layout.partitions[0].memory_bytes // 4
    model_priority = Priority.MEDIUM if hog is Priority.MEDIUM else Priority.HIGH
    with ExitStack() as stack:
        beside = None
        if hog is not None:
            beside = _enter(stack, manager, "hog", DemoShare(memory_bytes=share, priority=hog), "hog", 0)
            beside.answer()
        model = _enter(stack, manager, "model", DemoShare(memory_bytes=share, priority=model_priority), "decode", REQUESTS)
        model.answer()
        begun, before = time.monotonic(), _busy(stage, beside)
        taken = sorted(model.answer()["requests"])
        seconds, after = time.monotonic() - begun, _busy(stage, beside)
    hog_percent = None if before is None or after is None else 100 * (after - before) / seconds
    return {
        "requests": len(taken),
        "p50_ms": 1000 * statistics.median(taken),
        "p95_ms": 1000 * taken[int(0.95 * len(taken))],
        "tokens_per_second": STEPS * len(taken) / sum(taken),
        "hog_percent": hog_percent if hog is not None else None,
        "hog_kernel_ms": HOG_NANOSECONDS / 1e6,
    }


def _busy(stage: DemoStage, tenant: DemoTenant | None) -> float | None:
    """Device seconds of a tenant, where the driver has a meter for them."""
    gpu = getattr(stage.manager.hardware, "gpu", None)
    if gpu is None or tenant is None:
        return None
    return next((one.busy_seconds for one in gpu.read_processes() if one.pid == tenant.process.pid), 0.0)


def play_partitions(stage: DemoStage) -> SceneResult:
    """From one partition to eight: refused while tenants run, then made, with a tenant in each."""
    manager, device = stage.manager, stage.manager.device()
    if not stage.software:
        return _skipped("a layout of a real GPU is not changed by a demo; `aimgpu doctor --verify --change-layouts` tries them")
    wanted = _layout_of(device, "CPX")
    if wanted is None:
        return _skipped(f"{device.product} has no CPX mode")
    with ExitStack() as stack:
        tenant = _enter(stack, manager, "tenant", DemoShare(memory_bytes=GIB), "fill", GIB)
        tenant.answer()
        try:
            manager.hardware.apply_layout(device.id, wanted.name)
            refusal = None
        except PartitionBusy as error:
            refusal = error.message
    changed = manager.hardware.apply_layout(device.id, wanted.name)
    with ExitStack() as stack:
        held = []
        for partition in changed.layout.partitions:
            size = partition.memory_bytes
            share = DemoShare(memory_bytes=size)
            tenants = _enter(stack, manager, f"part{partition.index}", share, "fill", 10 * size, partition=partition)
            held.append((partition, tenants.answer()["held_bytes"]))
        measured = dict(manager.usage().used_bytes_by_partition)
        equal = all(measured[partition.id] == size == partition.memory_bytes for partition, size in held)
    manager.hardware.apply_layout(device.id, device.layout.name)
    sizes, answer = sum(size for _, size in held), f"refused ({refusal})" if refusal else "done"
    return SceneResult(
        verdict=_judge(refusal is not None, equal, len(held) == len(wanted.partitions)),
        lines=(
            f"{device.layout.name} to {wanted.name} while a tenant runs: {answer}.",
            f"After it ended: {len(held)} partitions of {format_bytes(changed.layout.partitions[0].memory_bytes)}.",
            f"A tenant in each asks for ten times its partition. Together they hold {sizes:,} bytes;",
            f"{stage.meter} counts {sum(measured.values()):,} ({'each full, none over' if equal else 'NOT EQUAL'}).",
        ),
        figures={"partitions": len(held), "held_bytes": sizes, "measured_bytes": measured, "refusal": refusal},
        measured_by={"held_bytes": "the tenants", "measured_bytes": stage.meter, "partitions": "read back from the GPU"},
    )


def _layout_of(device: Device, mode: str) -> Layout | None:
    return next((layout for layout in device.layouts if layout.compute_mode == mode), None)


def play_crash(stage: DemoStage) -> SceneResult:
    """Three tenants; two of them and the process that keeps the ledger are killed; another one takes over."""
    manager = stage.manager
    share = manager.device().layout.partitions[0].memory_bytes // 10 // (2 * MIB) * (2 * MIB)
    folder = manager.folder / "crash"
    hardware = wiring.demo_hardware(stage.product, folder)
    before = manager.usage()
    names = ("first", "second", "third")
    command = [
        sys.executable,
        "-m",
        "aimgpu.cli.demo.manager",
        str(folder),
        stage.product or "real",
        *(f"{name}={share}" for name in names),
    ]
    keeper = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own program
    try:
        line = keeper.stdout.readline() if keeper.stdout else ""
        if not line:
            raise HardwareFailed("the process that keeps the ledger did not start")
        told = {one["name"]: one for one in json.loads(line)}
        victims = [told[name]["pid"] for name in names[:2]]
        for pid in (keeper.pid, *victims):
            _kill(pid)
        keeper.wait()
        _await_gone(victims)
        again = DemoManager.open(folder, hardware)
        try:
            kept, gone = again.reconcile()
            charged = {grant.instance_id: grant.memory_bytes for grant in again.ledger.grants()}
            counted = _counted(again)
            listed = [one.pid for one in again.await_unlisted(victims).processes]
            survivor = told[names[2]]
            mine = again.measured(survivor["pid"], before)
            _kill(survivor["pid"])
            _await_gone([survivor["pid"]])
            again.reconcile()
            left = _counted(again)
            empty = again.await_idle()
        finally:
            again.close()
    finally:
        keeper.kill()
        keeper.communicate()
    dead_listed = [pid for pid in victims if pid in listed]
    equal = charged == {names[2]: share} and counted == mine == share == survivor["held_bytes"]
    near = charged == {names[2]: share} and mine <= share and counted <= share
    return SceneResult(
        verdict=_judge(
            kept == [names[2]], sorted(gone) == sorted(names[:2]), equal if stage.software else near, not dead_listed, left == 0
        ),
        lines=(
            f"Three tenants of {format_bytes(share)} each. kill -9 of two of them and of the process that keeps the ledger.",
            f"The next one found {len(kept)} alive and gave back {len(gone)} shares.",
            f"Charged: {sum(charged.values()):,} bytes. {_capital(stage.meter)} counts {mine:,} ({_agreement(mine, share)}).",
            f"After kill -9 of the last one: {left:,} bytes charged, {len(empty.processes)} processes on the GPU.",
        ),
        figures={"charged_bytes": charged, "counted_bytes": counted, "measured_bytes": mine, "left_bytes": left},
        measured_by={"charged_bytes": "the ledger", "counted_bytes": "the interposer", "measured_bytes": stage.meter},
    )


def _counted(manager: DemoManager) -> int:
    region = manager.interposer.find_region(_partition(manager))
    if region is None:
        return 0
    region.reap()
    return sum(use.used_bytes for use in region.read_use())


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


SCENES = (
    Scene(name="cap", title="A tenant asks for ten times its share", play=play_cap),
    Scene(name="gate", title="A hog beside a model that answers", play=play_gate),
    Scene(name="partitions", title="One GPU becomes eight partitions", play=play_partitions),
    Scene(name="crash", title="kill -9 of tenants and of the ledger's keeper", play=play_crash),
)


def _agreement(measured: int, share: int) -> str:
    return "equal to the byte" if measured == share else "the driver's own memory included"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _skipped(why: str) -> SceneResult:
    return SceneResult(verdict=SceneVerdict.SKIPPED, lines=(f"Skipped: {why}.",), figures={}, measured_by={})


def _partition(manager: DemoManager) -> str:
    return manager.device().layout.partitions[0].id


def _enter(
    stack: ExitStack, manager: DemoManager, name: str, share: DemoShare, *program: object, partition: Partition | None = None
) -> DemoTenant:
    """A tenant for the length of the block: it is ended and its share given back, whatever happens."""
    tenant = manager.start(name, share, *program, partition=partition)
    stack.callback(manager.release, name)
    stack.callback(tenant.end)
    return tenant


def _await_gone(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        entries = [procfs.read_process(pid) for pid in pids]
        if all(entry is None or entry.ended for entry in entries):
            return
        time.sleep(0.01)
