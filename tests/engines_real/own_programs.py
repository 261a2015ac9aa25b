"""Servers from the package index, installed once per version, and models of random weights for them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.cache import cached
from tests.cluster.go_programs import UV

SPEECH = "faster-whisper-server==0.0.3"  # 250 MB
EMBEDDING = "infinity-emb[server,torch]==0.0.78"  # 6 GB
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PROGRAMS = Path(__file__).parent / "programs"


def install(requirement: str) -> Path:
    """The folder of its modules, for PYTHONPATH."""

    def fill(folder: Path) -> None:
        print(f"installing {requirement} (once)", file=sys.stderr)  # noqa: T201
        command = [str(UV), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder), requirement]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise RuntimeError(f"cannot install {requirement}: {answer.stderr[-2000:]}")

    key = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in requirement)
    return cached(f"{key}-{_PYTHON}", fill)


def write_model(modules: Path, program: str, folder: Path) -> Path:
    """By the libraries of the server that reads it: `tiny_whisper` or `tiny_bert`."""
    command = [os.path.realpath(sys.executable), str(_PROGRAMS / f"{program}.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(modules), "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return folder
