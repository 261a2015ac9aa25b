"""Ledgers in memory: each write waits for the disk, and thousands of writes would wait for a busy one."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")  # noqa: S108


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("ledger")
        return
    with tempfile.TemporaryDirectory(prefix="aimgpu-test-ledger-", dir=_MEMORY) as folder:
        yield Path(folder)
