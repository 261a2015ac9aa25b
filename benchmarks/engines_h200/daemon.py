"""One daemon with a home of its own for the engines benchmark, driven as a user drives it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aimgpu.cli.client import DaemonClient, connect
from aimgpu.errors import AimGpuError
from aimgpu.home import Home
from aimgpu.units import MIB
from benchmarks.engines_h200.models import SHAPES, write_model

ROOT = Path(__file__).parents[2]
PORT = 8391
URL = f"http://127.0.0.1:{PORT}"
_START_SECONDS = 60.0


class BenchmarkDaemon:
    """Models are folders under `folder`; logs of failed starts are copied to `out`."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        *,
        simulate: str | None = None,
        tiny: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.out = folder, out
        self._simulate, self._tiny = simulate, tiny
        self.home = Home(folder / "home")
        path = f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        self._environment = {**os.environ, "AIMGPU_CACHE": str(folder / "cache"), "PYTHONPATH": path, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The daemon alone; models are applied one stack after the other."""
        self.home.create()
        argv = [sys.executable, "-m", "aimgpu.daemon", "--home", str(self.home.path), "--port", str(PORT)]
        argv += ["--simulate", self._simulate] if self._simulate else []
        with (self.out / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(argv, env=self._environment, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(AimGpuError, OSError):
                if self.client().read_status().get("reconciled"):
                    return
            time.sleep(0.1)
        raise SystemExit("the daemon did not start: see daemon.log")

    def client(self) -> DaemonClient:
        return connect(self.home)

    def stop(self) -> None:
        """All models end first."""
        with contextlib.suppress(AimGpuError, OSError):
            self.client().stop()
        if self._process is not None:
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def clear_cache(self) -> None:
        """So that the next start compiles again."""
        shutil.rmtree(self.folder / "cache" / "vllm", ignore_errors=True)

    def model(self, shape: str) -> str:
        shape = "tiny" if self._tiny else shape
        return str(write_model(self.folder / "models" / f"random-{shape}", SHAPES[shape]))

    def apply(self, models: Mapping[str, Mapping[str, Any]], *, prune: bool = True) -> dict[str, Any]:
        """What it came to: seconds until the last is ready, and per model its events, seconds, grant and reason."""
        stack = json.dumps({"models": {name: self._entry(given) for name, given in models.items()}})
        began = time.monotonic()
        steps: list[str] = []
        seconds: dict[str, float] = {}
        stages: dict[str, list[str]] = {}
        error = None
        for event in self.client().apply(stack, str(self.folder), dry_run=False, make_room=False, prune=prune, launcher=None):
            name = str(event.get("deployment"))
            if event.get("event") == "step":
                steps.append(str(event.get("text")))
            elif event.get("event") == "state" and event.get("state") in ("ready", "failed", "sleeping"):
                seconds[name] = round(time.monotonic() - began, 1)
            elif event.get("event") == "state" and event.get("stage"):
                stages.setdefault(name, [])
                if event["stage"] not in [one.split(" ", 1)[1] for one in stages[name]]:
                    stages[name].append(f"{time.monotonic() - began:.0f}s {event['stage']}")
            elif event.get("event") in ("error", "refused"):
                error = str(event.get("text") or event.get("message"))
        return {
            "seconds": round(time.monotonic() - began, 1),
            "steps": [step for step in steps if "missed" in step],
            "ready_seconds": seconds,
            "stages": stages,
            "error": error,
            "instances": {one["name"]: one for one in self.client().read_status()["instances"]},
        }

    def keep_logs(self, names: list[str]) -> None:
        """The logs of these models, as far as there are any."""
        for name in names:
            with contextlib.suppress(OSError):
                shutil.copyfile(self.home.failed_log(name), self.out / f"failed-{name}.log")

    def driver_bytes(self) -> dict[str, int]:
        """By instance: what the driver counts for its processes."""
        if self._simulate:
            return {}
        import pynvml  # noqa: PLC0415 - only where there is a GPU

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        found: dict[str, int] = {}
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            tenant = _variable(process.pid, "AIMGPU_INSTANCE")
            if tenant and process.usedGpuMemory:
                found[tenant] = found.get(tenant, 0) + int(process.usedGpuMemory)
        return found

    def _entry(self, given: Mapping[str, Any]) -> dict[str, Any]:
        entry = {"engine": "vllm", "isolation": "none" if self._simulate else "enforced", **given}
        if entry["engine"] != "vllm":
            return {key: _plain(value) for key, value in entry.items()}
        entry["model"] = self.model(str(entry.pop("shape")))
        entry["args"] = {"load-format": "dummy", **entry.get("args", {})}
        return {key: _plain(value) for key, value in entry.items()}


def mib(size: int | None) -> float | None:
    """For tables."""
    return None if size is None else round(size / MIB, 1)


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON, which the stack file's YAML contains
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value if isinstance(value, list) else str(value)


def _variable(pid: int, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key.decode() == name:
                return value.decode()
    return None
