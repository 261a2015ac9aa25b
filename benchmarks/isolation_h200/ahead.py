"""How many launches of a best-effort tenant are ahead of a critical request, measured on the GPU itself.

A launch is ahead of a request when it had not ended when the request arrived, and had started before the request's first
kernel. Kernels stamp their own start and end (spin.py); the request's arrival is taken on the host and converted by
readings of both clocks on the idle GPU before and after. The allowance of touched requests is once the default, and once
without limit, so that a long launch starts in nearly every pause.
"""

import contextlib
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aimgpu.domain import Priority
from aimgpu.units import GIB, PPM
from benchmarks.isolation_h200.bench import PATIENCE_SECONDS, Bench, Member, end, expect, limits_of, send
from benchmarks.isolation_h200.stage import Patience

if TYPE_CHECKING:
    import subprocess

SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    launch_ms: int
    hogs: int = 1
    signal: bool = True
    allowance_ppm: int | None = None  # None: the default

    @property
    def title(self) -> str:
        allowance = "default allowance" if self.allowance_ppm is None else "no limit on touches"
        return f"{self.launch_ms} ms, {self.hogs} hog, {'signals' if self.signal else 'no signals'}, {allowance}"


SETTINGS = (
    Setting(launch_ms=2),
    *(Setting(launch_ms=ms) for ms in (20, 80, 190)),
    *(Setting(launch_ms=ms, allowance_ppm=PPM) for ms in (20, 80, 190)),
    *(Setting(launch_ms=ms, allowance_ppm=PPM, signal=False) for ms in (20, 190)),
    Setting(launch_ms=20, allowance_ppm=PPM, hogs=2),
)


def measure_ahead(bench: Bench, figures: dict[str, Any]) -> None:
    spin = Bench(bench.folder, SECONDS, workloads="benchmarks.isolation_h200.spin")
    rows = []
    for number, setting in enumerate(SETTINGS):
        row = {"row": f"ahead, {setting.title}", **measure_setting(spin, f"ahead-{number}", setting)}
        rows.append(row)
        bench.rows.append(row)
        print(json.dumps(row), flush=True)
    figures["ahead_most"] = max(row["ahead_most"] for row in rows)
    figures["ahead"] = {setting.title: summarise(row) for setting, row in zip(SETTINGS, rows, strict=True)}


def summarise(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("launch_ms", "requests", "ahead", "ahead_most", "first_kernel_later_ms")}


def measure_setting(bench: Bench, name: str, setting: Setting) -> dict[str, Any]:
    server = Member(name="critical", kind="server", priority=Priority.HIGH, signal=setting.signal, cap_bytes=4 * GIB)
    hogs = [
        Member(name=f"hog{number}", kind="hog", priority=Priority.LOW, cap_bytes=4 * GIB, seed=setting.launch_ms)
        for number in range(setting.hogs)
    ]
    region = bench.create_region(name)
    for member in (server, *hogs):
        region.admit(limits_of(member))
    if setting.allowance_ppm is not None:
        region.header.allowance_ppm = setting.allowance_ppm
    running = {member.name: bench.start(member, region) for member in (server, *hogs)}
    try:
        with Patience(PATIENCE_SECONDS, running):
            for process in running.values():
                expect(process, "READY")
            clocks = [order(running["critical"], "CLOCK")]
            for hog in hogs:
                send(running[hog.name], "RUN")
                expect(running[hog.name], "BEGUN")
            requests = order(running["critical"], f"GO {SECONDS}")["requests"]
            for hog in hogs:
                send(running[hog.name], "STOP")
            region.header.absent_ns = 1  # one that is held back for a pause ends now
            region.wake()
            launches = [json.loads(expect(running[hog.name], "{"))["launches"] for hog in hogs]
            clocks.append(order(running["critical"], "CLOCK"))
    finally:
        end(running.values())
        for pipe in (pipe for process in running.values() for pipe in (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        region.close()
    return describe(requests, launches, clocks)


def order(process: "subprocess.Popen[str]", line: str) -> Any:  # noqa: ANN401 JSON
    send(process, line)
    return json.loads(expect(process, "{"))


def describe(
    requests: Sequence[Sequence[int]], launches: Sequence[Sequence[Sequence[int]]], clocks: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """`requests`: arrival by the host's clock, start of the first kernel and end of the last by the GPU's."""
    error = max(clock["error_ns"] for clock in clocks)
    arrived = [to_device(request[0], clocks) for request in requests]
    per_tenant = [
        [count_ahead(at + error, first, tenant) for at, (_, first, _) in zip(arrived, requests, strict=True)]
        for tenant in launches
    ]
    within = [
        sum(at + error < start < last for tenant in launches for start, _ in tenant)
        for at, (_, _, last) in zip(arrived, requests, strict=True)
    ]
    later = sorted((first - at) / 1e6 for at, (_, first, _) in zip(arrived, requests, strict=True))
    return {
        "requests": len(requests),
        "hog_launches": sum(map(len, launches)),
        "launch_ms": round(statistics.median(stop - start for tenant in launches for start, stop in tenant) / 1e6, 2),
        "ahead": distribution(itertools.chain.from_iterable(per_tenant)),
        "ahead_most": max(itertools.chain.from_iterable(per_tenant)),
        "ahead_most_of_all_tenants": max(map(sum, zip(*per_tenant, strict=True))),
        "started_within_a_request": distribution(within),
        "first_kernel_later_ms": {"p50": round(statistics.median(later), 3), "most": round(later[-1], 3)},
        "clock_error_us": round(error / 1000, 1),
    }


def count_ahead(arrived: int, first: int, launches: Sequence[Sequence[int]]) -> int:
    return sum(start < first and stop > arrived for start, stop in launches)


def to_device(host_ns: int, clocks: Sequence[Mapping[str, int]]) -> int:
    """By two readings of both clocks, which drift against each other."""
    before, after = clocks
    part = (host_ns - before["host_ns"]) / (after["host_ns"] - before["host_ns"])
    return before["device_ns"] + round(part * (after["device_ns"] - before["device_ns"]))


def distribution(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}
