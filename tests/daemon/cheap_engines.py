"""The real daemon with engines that cost next to nothing, for tests with many of them."""

import json
import subprocess
from pathlib import Path

from tests.daemon.running import ROOT, TestDaemon

GPUS = 4


class CheapDaemon(TestDaemon):
    """Models are named for the milliseconds that they load: "any/250"."""

    program = "benchmarks.daemon.process"
    arguments = ("--simulate", "MI300X", "--count", str(GPUS))

    def __init__(self, folder: Path, **timing: float) -> None:
        super().__init__(folder / "home")
        engine, source = folder / "engine", ROOT / "benchmarks" / "daemon" / "engine.c"
        subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", "-o", str(engine), str(source)], check=True)
        self.record = folder / "requests"  # what engines were asked
        self.set(AIMGPU_BENCH_ENGINE=str(engine), AIMGPU_BENCH_RECORD=str(self.record), AIMGPU_BENCH_TIMING=json.dumps(timing))


def models(count: int, *, load_ms: int, prefix: str = "m") -> str:
    return json.dumps({"models": {f"{prefix}{number}": {"model": f"any/{load_ms}"} for number in range(count)}})
