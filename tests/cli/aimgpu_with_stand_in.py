"""The `aimgpu` command, with the stand-in in place of the daemon."""

import sys
from pathlib import Path

from aimgpu.cli import daemon_process as daemon
from aimgpu.cli.main import main

daemon.PROGRAM = (sys.executable, str(Path(__file__).with_name("stand_in_daemon.py")))
main()
