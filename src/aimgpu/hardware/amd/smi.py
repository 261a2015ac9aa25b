"""AMD's own tool, for what only it knows and for those who want changes to go through it."""

import os
import shutil
from pathlib import Path

from aimgpu.errors import HardwareFailed, HardwareUnavailable
from aimgpu.hardware.amd import smi_json
from aimgpu.hardware.amd.command import CommandResult, CommandRunner, run_command

_USUAL_PLACES = ("/opt/rocm/bin/amd-smi", "/usr/bin/amd-smi")
_READ_SECONDS = 30.0


def find_amd_smi() -> Path | None:
    """On PATH, else where ROCM_PATH says that ROCm is, else in the usual places."""
    on_path = shutil.which("amd-smi")
    if on_path:
        return Path(on_path)
    rocm = os.environ.get("ROCM_PATH")
    places = [f"{rocm}/bin/amd-smi"] if rocm else []
    return next((Path(place) for place in (*places, *_USUAL_PLACES) if os.access(place, os.X_OK)), None)


class AmdSmi:
    """`amd-smi` as a program. What it prints is parsed tolerantly; what it prints instead of JSON is an error."""

    def __init__(
        self, program: Path | None = None, run: CommandRunner = run_command, *, seconds: float = _READ_SECONDS
    ) -> None:
        self._program = program or find_amd_smi()
        self._run = run
        self._seconds = seconds

    @property
    def is_installed(self) -> bool:
        """Whether the tool was found."""
        return self._program is not None

    @property
    def program(self) -> Path | None:
        """Where it was found."""
        return self._program

    def read_version(self) -> tuple[int, int] | None:
        """ROCm's version; None where the tool does not say."""
        return smi_json.parse_version(self.call("version").text)

    def read_gpus(self) -> tuple[smi_json.SmiGpu, ...]:
        """One entry per partition, as the tool lists them."""
        return smi_json.parse_list(self._read("list", "-e"))

    def find_market_names(self) -> dict[str, str]:
        """By PCI address; empty where the tool does not work."""
        try:
            names = smi_json.parse_market_names(self._read("static", "--asic"))
            return {gpu.bdf: names[gpu.gpu] for gpu in self.read_gpus() if gpu.bdf and gpu.gpu in names}
        except HardwareFailed:
            return {}

    def find_pids(self) -> tuple[int, ...]:
        """Processes on any GPU; empty where the tool is missing or does not work."""
        try:
            return tuple(sorted({process.pid for process in self.read_processes()}))
        except HardwareFailed:
            return ()

    def read_partition_modes(self) -> dict[int, tuple[str | None, str | None]]:
        """Compute and memory mode by the tool's GPU number."""
        return smi_json.parse_partition_modes(self._read("static", "--partition"))

    def read_memory(self) -> dict[int, int]:
        """Total bytes of memory by the tool's GPU number."""
        return smi_json.parse_memory(self._read("metric", "--mem-usage"))

    def read_processes(self) -> tuple[smi_json.SmiProcess, ...]:
        """Processes that the tool sees on any GPU."""
        return smi_json.parse_processes(self._read("process"))

    def call(self, *arguments: str, answer: str = "", seconds: float | None = None) -> CommandResult:
        """Run it and return what it printed, whatever that says."""
        if self._program is None:
            raise HardwareUnavailable("amd-smi was not found", hint="Install AMD's tools (ROCm, package amd-smi).")
        return self._run([str(self._program), *arguments], timeout_seconds=seconds or self._seconds, answer=answer)

    def _read(self, *arguments: str) -> str:
        outcome = self.call(*arguments, "--json")
        if smi_json.find_json(outcome.stdout) is None:
            failure = smi_json.find_failure(outcome.text)
            reported = failure[1] if failure else (outcome.text.strip().splitlines() or ["nothing"])[-1]
            raise HardwareFailed(
                f"`amd-smi {' '.join(arguments)}` gave no data: {reported}",
                hint="Run it by hand; the driver may not be loaded, or the tool may be broken.",
            )
        return outcome.stdout
