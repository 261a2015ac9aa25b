"""How long vLLM takes from its start to its first token: plainly, and from a prepared process. In turns, on the CPU.

The program is the real vLLM for the CPU, installed once (6 GB). Models have random weights. The first start of a shape fills
vLLM's compile cache and does not count. CPU seconds are those of the engine's own processes; a machine that is busy otherwise
changes them little.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engines_real.vllm_program import VERSION, install_vllm

from aimgpu import procfs
from aimgpu.domain import Exactness, Footprint, Instance, InstanceState, ProcessIdentity, Term
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.protocols import HealthState, LaunchRequest
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.units import MIB
from benchmarks.engines_h200.models import SHAPES, write_model
from benchmarks.recording import write_result

_LONGEST_SECONDS = 900.0
_TICKS = os.sysconf("SC_CLK_TCK")


def make_request(folder: Path, shape: str, *, prepared: bool) -> LaunchRequest:
    """For a model of this shape, whatever it needs."""
    model = write_model(folder / "models" / shape, SHAPES[shape])
    footprint = Footprint(
        model=shape,
        engine="vllm",
        precision="bf16",
        context_tokens=1024,
        concurrency=4,
        terms=(Term(name="weights", memory_bytes=1, exactness=Exactness.EXACT, formula="given"),),
        flags={"kv-cache-memory-bytes": str(256 * MIB), "load-format": "dummy"},
    )
    name = shape.replace(".", "-")
    instance = Instance(
        id=f"{name}-0",
        deployment=name,
        replica=0,
        model=shape,
        engine="vllm",
        launcher="process",
        state=InstanceState.LOADING,
    )
    return LaunchRequest(
        instance=instance,
        model_path=model,
        footprint=footprint,
        environment={},
        device_nodes=(),
        run_directory=folder / "runs" / name,
        api_key="benchmark",
        prepared=prepared,
    )


def tree_seconds(root: int) -> float:
    """CPU seconds of a process and all that descend from it and live."""
    total = 0
    for pid in procfs.read_tree(root):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    return total / _TICKS


def tree_memory(pids: tuple[int, ...] | frozenset[int]) -> dict[str, int]:
    """MiB: all pages, and those that no other process has."""
    found = {"rss_mib": 0, "private_mib": 0}
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        size = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        found["rss_mib"] += size["Rss"] >> 10
        found["private_mib"] += (size["Private_Clean"] + size["Private_Dirty"]) >> 10
    return found


class Rig:
    """One home with its launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = VllmEngine()
        self.launcher = ProcessLauncher(folder / "home")

    def import_once(self, shape: str) -> float:
        """Seconds until a prepared process is ready."""
        request = make_request(self.folder, shape, prepared=True)
        began = time.monotonic()
        self.launcher.fetch(self.engine.command(request), request.run_directory, lambda _: None, lambda: None)
        return time.monotonic() - began

    def start(self, shape: str, *, prepared: bool) -> dict[str, Any]:
        """A row: until the first token."""
        request = make_request(self.folder, shape, prepared=prepared)
        command = self.engine.command(request)
        began = time.monotonic()
        if prepared:
            self.launcher.fetch(command, request.run_directory, lambda _: None, lambda: None)
        process = self.launcher.start(request.instance.id, command, request.run_directory)
        try:
            if self.launcher.prepared_pids() and prepared != self.launcher.is_forked(process):
                raise SystemExit(f"{shape} was not started as asked")
            seconds = self._wait(request, process, began)
            row = {"shape": shape, "prepared": prepared, "seconds": round(seconds, 2), "cpu_seconds": tree_seconds(process.pid)}
            return row | tree_memory(procfs.read_tree(process.pid))
        finally:
            self.launcher.stop(process, grace_seconds=20.0)

    def _wait(self, request: LaunchRequest, process: ProcessIdentity, began: float) -> float:
        while True:
            if self.engine.check_health(request.run_directory, request.api_key).state is HealthState.READY:
                return time.monotonic() - began
            if not self.launcher.is_running(process) or time.monotonic() - began > _LONGEST_SECONDS:
                raise SystemExit("\n".join(self.launcher.last_lines(request.run_directory, 60)))
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="tiny,0.5b,1b")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([str(install_vllm()), os.environ["PATH"]])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    folder = Path(tempfile.mkdtemp(prefix="aimgpu-start-"))
    rig = Rig(folder)
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"vllm": VERSION}
    try:
        figures["import_seconds"] = round(rig.import_once("tiny"), 2)
        figures["prepared_process"] = tree_memory(rig.launcher.prepared_pids())
        for shape in given.shapes.split(","):
            rig.start(shape, prepared=False)
            mine = [rig.start(shape, prepared=prepared) for _ in range(given.turns) for prepared in (False, True)]
            rows += mine
            for name in ("seconds", "cpu_seconds"):
                ways = [[row[name] for row in mine if row["prepared"] is way] for way in (False, True)]
                plain, forked = map(statistics.median, ways)
                figures |= {f"{shape}.plain_{name}": plain, f"{shape}.prepared_{name}": forked}
                figures[f"{shape}.{name}_x"] = round(forked / plain, 3)
            print(json.dumps(figures, indent=1), flush=True)
    finally:
        rig.launcher.end_prepared()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"written to {write_result('start-prepared', figures, rows)}")


if __name__ == "__main__":
    main()
