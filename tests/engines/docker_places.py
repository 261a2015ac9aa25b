"""Where containers run in these tests: Docker's stand-in, or a Docker of their own."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.programs.engine import PROGRAM

from aimgpu.engines.protocols import Command, Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A Docker, and how to run our small engine in it."""

    socket: Path
    image: str
    mounts: tuple[Mount, ...]

    def command(self, run_directory: Path, *flags: str, image: str | None = None) -> Command:
        argv = (sys.executable, str(PROGRAM), str(run_directory), *flags)
        return Command(argv=argv, image=image or self.image, mounts=self.mounts, secrets={"AIMGPU_ENGINE_KEY": "s3cret"})
