"""The daemon's limit of open files, in a process of its own: a limit that was lowered cannot be raised again here."""

import subprocess
import sys

import pytest

TELL = """
import resource, sys
from aimgpu.daemon.assembly import allow_open_files
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_open_files(4096)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 1024, (1024, 1024)), (256, 8192, (4096, 8192)), (6000, 8192, (6000, 8192))],
    ids=["up to the hard limit", "no further than it needs", "never less than before"],
)
def test_the_soft_limit_is_raised(soft: int, hard: int, expected: tuple[int, int]) -> None:
    done = subprocess.run([sys.executable, "-c", TELL, str(soft), str(hard)], capture_output=True, text=True, check=True)
    assert tuple(map(int, done.stdout.split())) == expected
