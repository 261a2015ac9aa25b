"""Commands that only look do not load what only deciding needs."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("ps", ["aimgpu.domain", "aimgpu.sizing", "aimgpu.hardware", "aimgpu.wiring", "aimgpu.control"]),
        ("chat", ["aimgpu.domain", "aimgpu.sizing", "aimgpu.hardware", "aimgpu.wiring", "aimgpu.control"]),
        ("up", ["aimgpu.wiring", "aimgpu.control.plan.preparation"]),
    ],
)
def test_a_command_that_asks_the_daemon_imports_nothing_that_decides(module: str, heavy: list[str]) -> None:
    program = f"import sys, aimgpu.cli.commands.serve.{module}\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", [["gpus"], ["partition", "list"], ["ps"]])
def test_looking_at_gpus_does_not_import_numpy(command: list[str], tmp_path: Path) -> None:
    program = f"import sys\nfrom aimgpu.cli.main import run_command\nrun_command({command!r})\nprint('numpy' in sys.modules)"
    environment = {"AIMGPU_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "False"
