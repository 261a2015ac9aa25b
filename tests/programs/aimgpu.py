"""The `aimgpu` command, which starts the real daemon with a fake engine (`tests.programs.daemon`)."""

import sys

from aimgpu.cli import daemon_process
from aimgpu.cli.main import main

daemon_process.PROGRAM = (sys.executable, "-m", "tests.programs.daemon")
main()
