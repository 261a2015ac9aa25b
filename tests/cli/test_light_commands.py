"""Commands that only look do not load what only deciding needs."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [["gpus"], ["partition", "list"], ["ps"]])
def test_looking_at_gpus_does_not_import_numpy(command: list[str], tmp_path: Path) -> None:
    program = f"import sys\nfrom aimgpu.cli.main import run_command\nrun_command({command!r})\nprint('numpy' in sys.modules)"
    environment = {"AIMGPU_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "False"
