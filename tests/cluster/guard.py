"""Removes what is left of a cluster when the process that it belongs to ends, whatever ends it: ``guard.py FOLDER``.

Runs as a program of its own, in a session of its own and outside the cluster's control groups. Its standard input is a pipe
whose other end only the owner has; the kernel closes that end with the owner. A regular end of the cluster leaves it nothing
to remove. Should the guard be killed too, the next start of a cluster removes what is left.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.stale import is_owned, remove

REPOSITORY = Path(__file__).parents[2]
LOOK_SECONDS = 2.0


class Guard:
    """The guard of one cluster, as its owner holds it."""

    def __init__(self, folder: Path, log: Path) -> None:
        reading, self._writing = os.pipe()  # children that are executed do not inherit it
        # Without site packages: it starts at once, and imports nothing that a test may replace.
        command = [sys.executable, "-E", "-S", "-m", "tests.cluster.guard", str(folder)]
        with log.open("ab") as output, os.fdopen(reading, "rb") as pipe:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True, cwd=REPOSITORY
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def release(self) -> None:
        """Let it end, and wait for that. What it still finds of the cluster it removes. May be called twice."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        self._process.wait()


def main(folder: Path) -> None:
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # often sent to all processes of a run; this one ends right after the others
    # A child that was forked without executing anything has the pipe too: hence a look at the owner from time to time.
    while is_owned(folder) and not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        continue
    if folder.exists():
        remove(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
