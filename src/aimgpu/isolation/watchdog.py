"""Checks from outside: what the driver says that each tenant's processes use, against what was granted.

The library counts what it sees; this counts what is there. Foreign processes are named, never touched.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aimgpu.domain import DeviceUsage, Grant, Level, WatchdogPolicy
from aimgpu.isolation.processes import read_names
from aimgpu.isolation.region import Region
from aimgpu.isolation.starvation import StarvationReporter
from aimgpu.procfs import PROC, read_tree
from aimgpu.units import MIB, format_bytes

log = logging.getLogger(__name__)

DEFAULT_TOLERANCE_BYTES = 256 * MIB  # contexts and loaded kernels differ by this much between drivers and cards
THROTTLED_PPM = 100_000
_DRIVER_FILES = frozenset({"/dev/kfd", "/dev/nvidia-uvm"})  # nvidia-smi, which only looks, opens neither


class Violation(StrEnum):
    """What can be wrong."""

    OVER = "over"  # more memory than granted
    UNHELD = "unheld"  # on the device without the library
    FOREIGN = "foreign"  # not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One instance as the watchdog sees it."""

    instance_id: str
    grants: tuple[Grant, ...]
    pids: frozenset[int]  # its process and all that descend from it
    policy: WatchdogPolicy = WatchdogPolicy.WARN
    demanded: bool = False  # must not run without enforcement
    interposed: bool = False  # held by the library, so its processes must be in the region
    attached: frozenset[int] = frozenset()  # those that are, or will be at their first call of the driver
    loose: frozenset[int] = frozenset()  # those that use a device and cannot be, whether or not the driver lists them


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One violation, and what is done about it."""

    finding: Violation
    device_id: str
    text: str
    instance_id: str | None = None  # None: not one of ours
    pids: frozenset[int] = frozenset()
    level: Level | None = None  # what is true now, if that is less than granted
    action: WatchdogPolicy | None = None  # None: nothing is done


def judge(
    usages: Iterable[DeviceUsage],
    watched: Collection[Watched],
    *,
    helpers: frozenset[int] = frozenset(),
    tolerance_bytes: int = DEFAULT_TOLERANCE_BYTES,
) -> tuple[Judgement, ...]:
    """Pure: everything that is not as granted, device by device. `helpers`: ours without being a tenant's."""
    verdicts: list[Judgement] = []
    ours = helpers.union(*(instance.pids for instance in watched))
    for usage in usages:
        for instance in watched:
            verdicts += _judge_instance(usage, instance, tolerance_bytes)
        for process in usage.processes:
            if process.pid not in ours:
                held = "an unknown amount" if process.memory_bytes is None else format_bytes(process.memory_bytes)
                text = f"pid {process.pid} ({process.name or 'unknown'}) is not ours and holds {held} of {usage.device_id}"
                verdicts.append(
                    Judgement(finding=Violation.FOREIGN, device_id=usage.device_id, text=text, pids=frozenset({process.pid}))
                )
    return tuple(verdicts)


def _judge_instance(usage: DeviceUsage, instance: Watched, tolerance_bytes: int) -> list[Judgement]:
    grants = [grant for grant in instance.grants if grant.device_id == usage.device_id]
    mine = [process for process in usage.processes if process.pid in instance.pids]
    if not mine and not (grants and instance.loose):
        return []
    verdicts = []
    unheld = frozenset(process.pid for process in mine) - instance.attached | (instance.loose if grants else frozenset())
    if instance.interposed and unheld:
        verdicts.append(_unheld(usage.device_id, instance, unheld))
    granted = sum(grant.memory_bytes for grant in grants)
    measured = [process.memory_bytes for process in mine]
    known = sum(value for value in measured if value is not None)
    if known > granted + tolerance_bytes and not any(grant.exclusive for grant in grants):
        uses, given = format_bytes(known, up=True), format_bytes(granted, up=True)
        text = f"{instance.instance_id} uses {uses} of {usage.device_id}, {given} were granted"
        verdicts.append(
            Judgement(
                finding=Violation.OVER,
                device_id=usage.device_id,
                text=text,
                instance_id=instance.instance_id,
                pids=frozenset(process.pid for process in mine),
                action=instance.policy,
            )
        )
    return verdicts


def _unheld(device_id: str, instance: Watched, pids: frozenset[int]) -> Judgement:
    """An instance that demanded enforcement must not run without it; for others the level drops to what is true."""
    names = ", ".join(map(str, sorted(pids)))
    return Judgement(
        finding=Violation.UNHELD,
        device_id=device_id,
        text=f"{instance.instance_id}: pid {names} uses {device_id} without the library; its limits do not hold",
        instance_id=instance.instance_id,
        pids=pids,
        level=Level.ADVISORY,
        action=WatchdogPolicy.STOP if instance.demanded and instance.policy is not WatchdogPolicy.RESTART else instance.policy,
    )


class Watchdog:
    """Looks once when asked to; the caller has the clock.

    `act` restarts or stops an instance of ours; throttling is done in the region.
    """

    def __init__(
        self,
        read_usage: Callable[[], Iterable[DeviceUsage]],
        read_watched: Callable[[], Collection[Watched]],
        act: Callable[[str, WatchdogPolicy], None],
        regions: Callable[[], Iterable[Region]] = tuple,
        read_helpers: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self._read_usage = read_usage
        self._read_watched = read_watched
        self._act = act
        self._regions = regions
        self._read_helpers = read_helpers
        self._known: frozenset[tuple[Violation, str | None, frozenset[int]]] = frozenset()
        self._starvation = StarvationReporter(time.monotonic)

    def look(self) -> tuple[Judgement, ...]:
        """All violations now. One that was found before is reported and acted upon again only after it ended in between."""
        for region in self._regions():
            region.reap()
        self._starvation.look(self._regions())
        verdicts = judge(self._read_usage(), self._read_watched(), helpers=self._read_helpers())
        for verdict in verdicts:
            if _key(verdict) not in self._known:
                self._answer(verdict)
        self._known = frozenset(map(_key, verdicts))
        return verdicts

    def _answer(self, verdict: Judgement) -> None:
        log.warning("watchdog.%s: %s (%s)", verdict.finding, verdict.text, verdict.action or "nothing is done")
        if verdict.instance_id is None or verdict.action in (None, WatchdogPolicy.WARN):
            return
        if verdict.action is WatchdogPolicy.THROTTLE:
            for region in self._regions():
                region.throttle(verdict.instance_id, THROTTLED_PPM)
            return
        self._act(verdict.instance_id, verdict.action)


def _key(verdict: Judgement) -> tuple[Violation, str | None, frozenset[int]]:
    return verdict.finding, verdict.instance_id, verdict.pids


def find_attached(regions: Iterable[Region], pids: Collection[int], proc: Path = PROC) -> frozenset[int]:
    """Which of these processes are in a region; they may have written the pid that they have inside a container."""
    slots = {(slot.pid, slot.start_ticks) for region in regions for use in region.read_use() for slot in use.processes}
    return frozenset(pid for pid in pids if any(name in slots for name in read_names(pid, proc)))


def find_mapped(regions: Collection[Region], pids: Iterable[int], proc: Path = PROC) -> frozenset[int]:
    """Which of these have the library loaded, for a region that is still there.

    The driver lists a process while its first context is being made, which takes seconds where several connect to MPS at once;
    the library attaches the process when that call returns.
    """
    paths = tuple(f" {region.path}" for region in regions)
    return frozenset(pid for pid in pids if _maps_any(proc / str(pid), paths, otherwise=False))


def find_loose(regions: Collection[Region], pids: Iterable[int], proc: Path = PROC) -> frozenset[int]:
    """Which of these have the compute driver open and no region: whatever the driver lists, nothing holds them.

    The library maps its region as soon as it is loaded. A static program, one that lost `LD_PRELOAD`, or one whose region was
    not usable has none, and neither has one whose region was made again since.
    """
    paths = tuple(f" {region.path}" for region in regions)
    return frozenset(pid for pid in pids if _opens_driver(proc / str(pid)) and not _maps_any(proc / str(pid), paths))


def _opens_driver(process: Path) -> bool:
    with contextlib.suppress(OSError):  # gone, or not ours to look at
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed since
                if str(entry.readlink()) in _DRIVER_FILES:
                    return True
    return False


def _maps_any(process: Path, paths: tuple[str, ...], *, otherwise: bool = True) -> bool:
    """`otherwise`: where it may not be looked at."""
    try:
        return any(line.endswith(paths) for line in (process / "maps").read_text(errors="replace").splitlines())
    except OSError:
        return otherwise


def watch_instance(instance_id: str, root_pid: int, grants: tuple[Grant, ...], regions: Collection[Region]) -> Watched:
    """What `judge` needs to know of a running instance."""
    pids = read_tree(root_pid)
    attached = find_attached(regions, pids)
    attached |= find_mapped(regions, pids - attached)
    names = {use.name for region in regions for use in region.read_use()}
    return Watched(
        instance_id=instance_id,
        grants=grants,
        pids=pids,
        interposed=instance_id in names,
        attached=attached,
        loose=find_loose(regions, pids - attached),
    )
