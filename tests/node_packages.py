"""Packages of npm that tests run, from a lock file, installed once below build/."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.downloads import one_line

from aimgpu.files import locked

_BUILD = Path(__file__).resolve().parent.parent / "build"


def install_packages(source: Path, name: str) -> Path:
    """A folder with the files of `source` and what its package-lock.json names; skips where it cannot be had."""
    if shutil.which("npm") is None:
        pytest.skip("Node is not here")
    folder = _BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    lock, installed = (source / "package-lock.json").read_bytes(), folder / "installed"
    with locked(installed):  # another worker may be installing them
        for path in source.iterdir():
            shutil.copy(path, folder)
        if not installed.exists() or installed.read_bytes() != lock:
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=900)
            if done.returncode:
                pytest.skip(f"packages of npm cannot be installed: {one_line(done.stderr)}")
            installed.write_bytes(lock)  # last: an installation that was cut short is done again
    return folder
