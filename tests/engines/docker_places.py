"""Where containers run in these tests: Docker's stand-in, or a Docker of their own."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.programs.engine import PROGRAM

from aimgpu.engines.endpoint import choose_port, write_endpoint
from aimgpu.engines.launchers.container import OWN_FOLDER
from aimgpu.engines.protocols import Command, Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A Docker, and how to run our small engine in it."""

    socket: Path
    image: str
    mounts: tuple[Mount, ...]

    def command(self, run_directory: Path, *flags: str, image: str | None = None) -> Command:
        """As an engine makes it: its port is chosen, and noted where the container does not see it."""
        port = choose_port()
        run_directory.mkdir(parents=True, exist_ok=True)
        write_endpoint(run_directory, port)
        own = str(run_directory / OWN_FOLDER)
        argv = (sys.executable, str(PROGRAM), own, "--host", "0.0.0.0", "--port", str(port), *flags)
        secrets = {"AIMGPU_ENGINE_KEY": "s3cret"}
        return Command(argv=argv, image=image or self.image, mounts=self.mounts, port=port, secrets=secrets)
