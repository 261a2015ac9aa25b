"""What the interposer adds to a call, against a driver that does nothing: `make bench-isolation_cost`.

One allocation and its free, by one process and by eight at once; a launch with nobody above, and a gated one beside a critical
tenant that is idle; the first context of one process, and of eight at once. Each figure is the best of 200 rounds of a process
(the machine's other work is not ours), and of several processes the slowest one's best. Without the library the driver's own
calls are measured the same way and stand beside it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority
from aimgpu.isolation import building
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB
from benchmarks.recording import write_result

HERE = Path(__file__).parent
CALLS = 2_000


class Bench:
    """A region with a critical, a best-effort and a lone tenant, and programs built against the driver that does nothing."""

    def __init__(self, folder: Path, interposer: Path) -> None:
        self.folder, self.interposer = folder, interposer
        driver = folder / "libcuda.so.1"
        compile_c("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, HERE / "null_driver.c")
        self.program = folder / "isolation_cost"
        compile_c("-o", self.program, HERE / "calls.c", driver, f"-Wl,-rpath,{folder}")
        self.number = 0

    def measure(self, what: str, *, processes: int = 1, count: int = CALLS, gated: bool = False, held: bool = True) -> float:
        """Nanoseconds per call of the slowest process."""
        self.number += 1
        path = self.folder / f"{self.number}.region"
        region = Region.create(path, device_bytes=80 * GIB, device="GPU-" + "a0" * 16)
        for name, priority in (("critical", Priority.HIGH), ("other", Priority.LOW)):
            region.admit(TenantLimits(name=name, cap_bytes=70 * GIB, priority=priority, context_bytes=400 * MIB))
        idle = [self._start("critical", path, "idle", 1)] if gated else []
        running = [self._start("other", path if held else None, what, count) for _ in range(processes)]
        for process in (*idle, *running):
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the program that measures {what} did not start")
        for process in running:
            if process.stdin is not None:
                process.stdin.write("x")
                process.stdin.flush()
        best = [float(process.communicate()[0].split()[0]) for process in running]
        for process in idle:
            process.communicate("x")
        region.close()
        return max(best)

    def _start(self, tenant: str, region: Path | None, what: str, count: int) -> "subprocess.Popen[str]":
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AIMGPU_")}
        if region is not None:
            environment |= {"AIMGPU_REGION": str(region), "AIMGPU_TENANT": tenant, "LD_PRELOAD": str(self.interposer)}
        command = [str(self.program), what, str(count)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compile_c(*arguments: object) -> None:
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", *map(str, arguments)], check=True)


def run(interposer: Path, repeats: int) -> dict[str, Any]:
    """The median of several repeats of each figure, in nanoseconds.

    The least would be that of a repeat without a gate: a critical tenant that does nothing for two seconds delays no one.
    """
    cases: dict[str, dict[str, Any]] = {
        "allocate and free, driver alone": {"what": "allocate", "held": False},
        "allocate and free": {"what": "allocate"},
        "allocate and free, 8 processes": {"what": "allocate", "processes": 8},
        "launch, driver alone": {"what": "launch", "held": False},
        "launch, nobody above": {"what": "launch"},
        "launch, gated, critical tenant idle": {"what": "launch", "gated": True},
        "first context": {"what": "context", "count": 1},
        "first context, 8 processes at once": {"what": "context", "count": 1, "processes": 8},
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), interposer)
        return {name: statistics.median(bench.measure(**case) for _ in range(repeats)) for name, case in cases.items()}


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found = run(building.find_interposer(), repeats)
    print(json.dumps(found, indent=2))
    write_result("isolation_cost", {"nanoseconds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
