"""Any preloadable shim beside none and ours, on the same software GPU in the same run: `make bench-interposer`.

    python -m benchmarks.interposer.run                                             none and ours
    python -m benchmarks.interposer.run --shim PATH --name NAME@COMMIT --set VARIABLE=VALUE ...

In a VALUE, {mib}, {bytes} and {percent} are the limits of the tenant, {tenant} is its name and {folder} a folder of this run.
Programs are started with the shim alone in LD_PRELOAD. What they hold, and how long the device worked for whom, is read from
the software GPU's own meter; times of calls are the programs' own, the least of many rounds. A program that ends by a signal
or does not end is a figure, too. docs/how-to/compare-shims.md shows the figures and how to add a shim.
"""

import argparse
import ctypes
import json
import mmap
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from aimgpu.domain import Priority
from aimgpu.hardware.software.state import VARIABLE, DriverState
from aimgpu.isolation import building
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB

CASES = Path(__file__).parent / "cases.c"
RESULTS = Path(__file__).parents[1] / "results" / "interposer.json"
SECONDS = 20  # for a program to end, or to say that it is ready
KINDS = {
    "linear": "plain memory",
    "managed": "managed memory",
    "pitched": "pitched memory",
    "async": "in the order of a stream",
    "pool": "from a pool",
    "managed_pool": "from a pool of managed memory",
    "array": "arrays",
    "array3d": "arrays of three dimensions",
    "mipmap": "mipmapped arrays",
    "handle": "memory with handles",
    "reimport": "exported, let go and imported again",
    "dlsym": "by a function found with dlsym",
}


def _stream(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise CaseFailedError("has no streams")
    return stream


class CaseFailedError(Exception):
    """A program did not do what the case asks: what happened instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shim:
    """What is preloaded; without a path nothing is."""

    name: str
    path: Path | None = None
    settings: tuple[str, ...] = ()
    is_ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who runs a program, and what was promised."""

    name: str = "tenant"
    cap_bytes: int = 64 * GIB
    percent: int = 100
    priority: Priority = Priority.LOW


@dataclass(slots=True, kw_only=True)
class Stage:
    """One case: a software GPU of its own, and the programs of its tenants."""

    folder: Path
    shim: Shim
    tools: Path  # with the software GPU and the program
    tenants: tuple[Tenant, ...]
    running: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        path = self.folder / "gpu.state"
        path.write_bytes(bytes(ctypes.sizeof(DriverState)))
        with path.open("r+b") as file:
            self.driver = DriverState.from_buffer(mmap.mmap(file.fileno(), 0))
        self.driver.device_bytes = 80 * GIB
        if self.shim.is_ours:
            region = Region.create(self.folder / "device.region", device_bytes=80 * GIB, device="")
            for tenant in self.tenants:
                region.admit(
                    TenantLimits(
                        name=tenant.name,
                        cap_bytes=tenant.cap_bytes,
                        rounding_bytes=1,
                        compute_ppm=tenant.percent * 10_000,
                        priority=tenant.priority,
                    )
                )
            region.close()

    driver: DriverState = field(init=False)

    def start(self, what: str, *numbers: object, tenant: str = "tenant", **more: str) -> "subprocess.Popen[str]":
        chosen = next(one for one in self.tenants if one.name == tenant)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIMGPU_", "CUDA_"))}
        environment |= {"LD_LIBRARY_PATH": str(self.tools), VARIABLE: str(self.folder / "gpu.state"), **more}
        if self.shim.is_ours:
            environment |= {"AIMGPU_REGION": str(self.folder / "device.region"), "AIMGPU_TENANT": tenant}
        words = {"mib": chosen.cap_bytes // MIB, "bytes": chosen.cap_bytes, "percent": chosen.percent}
        for setting in self.shim.settings:
            name, _, value = setting.partition("=")
            environment[name] = value.format(**words, tenant=tenant, folder=self.folder)
        if self.shim.path is not None:
            environment["LD_PRELOAD"] = str(self.shim.path)
        command = [str(self.tools / "cases"), what, *map(str, numbers)]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.running.append(process)
        return process

    def answer(self, process: "subprocess.Popen[str]") -> str:
        """The next line that it prints; raises CaseFailedError where there is none."""
        watch = subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -9 {process.pid}"])
        line = _stream(process.stdout).readline()
        watch.kill()
        watch.wait()
        if not line:
            code = process.wait()
            how = "does not end" if code == -signal.SIGKILL else f"ends by signal {-code}" if code < 0 else f"ends with {code}"
            raise CaseFailedError(how)
        return line

    def go(self, process: "subprocess.Popen[str]") -> None:
        _stream(process.stdin).write("x")
        _stream(process.stdin).flush()

    def run(self, what: str, *numbers: object, **more: str) -> float:
        return float(self.answer(self.start(what, *numbers, **more)))

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()


LONE = (Tenant(),)
CAPPED = (Tenant(cap_bytes=1 * GIB),)
PAIR = (Tenant(name="critical", priority=Priority.HIGH), Tenant(name="tenant"))


def cost(what: str, *numbers: object, tenants: tuple[Tenant, ...] = LONE) -> Callable[[Callable[..., Stage]], float]:
    return lambda make: make(tenants).run(what, *numbers)


def contended(make: Callable[..., Stage]) -> float:
    """Eight processes of one tenant allocate and free at once: the slowest one's best."""
    stage = make(LONE)
    processes = [stage.start("pair") for _ in range(8)]
    for process in processes:
        stage.answer(process)
    for process in processes:
        stage.go(process)
    return max(float(stage.answer(process)) for process in processes)


def pair(make: Callable[..., Stage]) -> float:
    stage = make(LONE)
    process = stage.start("pair")
    stage.answer(process)
    stage.go(process)
    return float(stage.answer(process))


def held_percent(stage: Stage) -> float:
    return 100 * int(stage.driver.used) / GIB


def held(kind: str) -> Callable[[Callable[..., Stage]], float]:
    """What a program holds that takes all it gets, in percent of its cap; by the meter."""

    def measure(make: Callable[..., Stage]) -> float:
        stage = make(CAPPED)
        stage.answer(stage.start("fill", kind, 256))
        return held_percent(stage)

    return measure


def early(make: Callable[..., Stage]) -> float:
    """The same for a program that allocates in a constructor."""
    stage = make(CAPPED)
    stage.answer(stage.start("fill", "linear", 256, CASES_EARLY="128"))
    return held_percent(stage)


def eight(make: Callable[..., Stage]) -> float:
    """Eight processes of one tenant take all they get."""
    stage = make(CAPPED)
    processes = [stage.start("fill", "linear", 256) for _ in range(8)]
    for process in processes:
        stage.answer(process)
    return held_percent(stage)


def after_kill(make: Callable[..., Stage]) -> float:
    """What the next process of a tenant gets whose former one was killed while it held all of the cap."""
    stage = make(CAPPED)
    first = stage.start("fill", "linear", 256)
    stage.answer(first)
    first.kill()
    first.wait()
    stage.answer(stage.start("fill", "linear", 256))
    return held_percent(stage)


def busy(stage: Stage) -> dict[int, int]:
    return {one.pid: one.busy_ns for one in stage.driver.processes if one.pid}


def ceiling(percent: int) -> Callable[[Callable[..., Stage]], float]:
    """The share of device time of a tenant that launches without a pause and may have so many percent."""

    def measure(make: Callable[..., Stage]) -> float:
        stage = make((Tenant(percent=percent),))
        process = stage.start("spin", 1000, 4000)
        stage.answer(process)
        stage.go(process)
        time.sleep(1)
        from_ns, begun = busy(stage)[process.pid], time.monotonic_ns()
        time.sleep(2.5)
        return 100 * (busy(stage)[process.pid] - from_ns) / (time.monotonic_ns() - begun)

    return measure


def fairness(make: Callable[..., Stage]) -> float:
    """Jain's index of the device time of four tenants with a quarter each that launch without a pause."""
    stage = make(tuple(Tenant(name=f"t{number}", percent=25) for number in range(4)))
    processes = [stage.start("spin", 1000, 4000, tenant=tenant.name) for tenant in stage.tenants]
    for process in processes:
        stage.answer(process)
    for process in processes:
        stage.go(process)
    time.sleep(3)
    times = [busy(stage)[process.pid] for process in processes]
    return sum(times) ** 2 / (len(times) * sum(one**2 for one in times))


def requests(make: Callable[..., Stage], *hog: object) -> list[float]:
    """Lengths of a critical tenant's requests of 5 ms, every 25 ms, beside what the other tenant does."""
    stage = make(PAIR)
    critical = stage.start("serve", 500, 4000, tenant="critical")
    others = [stage.start(*map(str, hog))] if hog else []
    for process in (*others, critical):
        stage.answer(process)
        stage.go(process)
    return [float(word) for word in stage.answer(critical).split()][5:]


def beside(*hog: object) -> Callable[[Callable[..., Stage]], float]:
    """The 95th percentile of the requests beside a hog, by that of the requests alone; each the better of two runs."""

    def measure(make: Callable[..., Stage]) -> float:
        alone = min(statistics.quantiles(requests(make), n=20)[18] for _ in range(2))
        with_hog = min(statistics.quantiles(requests(make, *hog), n=20)[18] for _ in range(2))
        return with_hog / alone

    return measure


def threads(make: Callable[..., Stage]) -> float:
    """Percent of the device that 64 threads of best effort get beside a critical tenant that never rests."""
    stage = make(PAIR)
    critical = stage.start("spin", 1000, 5000, tenant="critical")
    hog = stage.start("threads", 1000, 5000, 64)
    for process in (critical, hog):
        stage.answer(process)
        stage.go(process)
    time.sleep(4)
    times = busy(stage)
    return 100 * times[hog.pid] / (times[hog.pid] + times[critical.pid])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the matrix."""

    id: str  # of GPU-Virt-Bench where it has one
    what: str
    unit: str
    best: str  # "least", "most", or the figure that it should be
    measure: Callable[[Callable[..., Stage]], float]
    digits: int = 1


COSTS = (
    ("OH-001", "one launch", cost("launch")),
    ("OH-002, OH-003", "one allocation and its free", pair),
    ("OH-004", "start of the driver and the first context", cost("context")),
    ("OH-005", "asking how much is free", cost("info")),
    ("OH-006", "one allocation and its free, eight processes at once", contended),
    ("", "letting go of one of 10,000 memory handles", cost("release", 10_000)),
    ("IS-002", "one refusal at the cap", cost("refusal", tenants=CAPPED)),
)
BYTES = (
    *(("IS-001" if kind == "linear" else "", f"one process, {what}", held(kind)) for kind, what in KINDS.items()),
    ("", "one process that also allocates in a constructor", early),
    ("", "eight processes of one tenant", eight),
    ("", "the next process after one was killed", after_kill),
)
BESIDE = (
    ("IS-009", "launches of 2 ms", beside("spin", 2000, 6000)),
    ("", "one kernel that grew from 2 us to 20 ms", beside("grows", 20_000, 6000)),
    ("", "launches of 20 ms with a new grid each", beside("new_grids", 20_000, 6000)),
)
CASES_OF_ALL = (
    *(Case(id=of, what=what, unit="ns", best="least", measure=how) for of, what, how in COSTS),
    *(Case(id=of, what=f"held: {what}", unit="% of cap", best="100", measure=how, digits=4) for of, what, how in BYTES),
    Case(id="IS-003", what="device time with a ceiling of 30 %", unit="%", best="30", measure=ceiling(30)),
    Case(id="IS-003", what="device time with a ceiling of 10 %", unit="%", best="10", measure=ceiling(10)),
    Case(id="IS-008", what="Jain's index of four tenants with 25 % each", unit="", best="1", measure=fairness, digits=3),
    *(
        Case(id=of, what=f"p95 of critical requests beside {what}", unit="x alone", best="1", measure=how, digits=2)
        for of, what, how in BESIDE
    ),
    Case(
        id="", what="64 threads of best effort beside work without a pause", unit="% of device", best="least", measure=threads
    ),
)


def build(folder: Path) -> None:
    """The software GPU and the program that uses it."""
    for command in building.software_gpu_commands("cc", building.find_sources(), folder):
        subprocess.run(command, check=True)
    driver = folder / "libcuda.so.1"
    subprocess.run(["cc", "-O2", "-o", str(folder / "cases"), str(CASES), str(driver), "-lpthread", "-ldl"], check=True)


def measure(case: Case, shim: Shim, tools: Path) -> float | str:
    stages: list[Stage] = []
    with tempfile.TemporaryDirectory() as folder:

        def make(tenants: tuple[Tenant, ...]) -> Stage:
            own = Path(folder) / str(len(stages))
            own.mkdir()
            stages.append(Stage(folder=own, shim=shim, tools=tools, tenants=tenants))
            return stages[-1]

        try:
            return round(case.measure(make), case.digits)
        except (CaseFailedError, ValueError, KeyError) as error:
            return str(error)
        finally:
            for stage in stages:
                stage.close()


def table(rows: list[dict[str, object]], names: list[str]) -> str:
    lines = ["| id | what | unit | best | " + " | ".join(names) + " |", "| --- " * (4 + len(names)) + "|"]
    for row in rows:
        figures: Any = row["figures"]
        words = [row["id"], row["what"], row["unit"], row["best"], *(figures.get(name, "") for name in names)]
        lines.append("| " + " | ".join(f"{word:,}" if isinstance(word, float | int) else str(word) for word in words) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interposer.run")
    parser.add_argument("--shim", type=Path, help="a shared library to preload")
    parser.add_argument("--name", default="", help="what to call it, with its commit")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE", help="how it is told the limits")
    parser.add_argument("--only", default="", help="rows whose text has this")
    given = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    shims = [Shim(name="none"), Shim(name=f"ours@{commit}", path=building.find_interposer(), is_ours=True)]
    if given.shim is not None:
        shims.append(Shim(name=given.name or given.shim.name, path=given.shim.resolve(), settings=tuple(given.set)))
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for case in CASES_OF_ALL:
            if given.only in case.what:
                figures = {shim.name: measure(case, shim, Path(folder)) for shim in shims}
                rows.append({"id": case.id, "what": case.what, "unit": case.unit, "best": case.best, "figures": figures})
                print(rows[-1], flush=True)
    words = ["--shim", given.shim.name, "--name", given.name] if given.shim is not None else []
    told = {
        "commit": commit,
        "command": " ".join(["python -m benchmarks.interposer.run", *words, *(f"--set {one}" for one in given.set)]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores shared with other work; software GPU",
        "rows": rows,
    }
    if not given.only:
        RESULTS.write_text(json.dumps(told, indent=2) + "\n")
    print(table(rows, [shim.name for shim in shims]))
    return 0
