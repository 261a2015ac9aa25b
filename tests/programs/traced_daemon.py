"""The test daemon, which writes down the modules that requests to models cross on its event loop.

AIMGPU_TEST_WALK: the file to write at the end, JSON: room.module -> the functions entered. Nothing is traced until the file
with ".begin" after its name is there, which is then removed: what only the first request does is not of interest.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from tests.programs.daemon import make_dependencies

import aimgpu
from aimgpu.daemon.assembly import main

SOURCE = str(Path(aimgpu.__file__).parent) + os.sep
GATEWAY = SOURCE + "gateway" + os.sep
STARTING = {"main", "run_daemon"}  # on the stack of everything that the loop runs
TIMERS = {"_tick", "_sweep"}  # run beside requests, when their time comes
FALLBACK = "_answer_other"  # from here on it is no request to a model


class Walk:
    """A profile function: keeps what is entered below the gateway's own entry points, whoever called those."""

    def __init__(self) -> None:
        self.entered: dict[str, set[str]] = {}
        self.on = False

    def begin_on(self, begin: Path) -> None:
        while not begin.exists():
            time.sleep(0.01)
        self.on = True
        begin.unlink()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if self.on and event == "call" and name.startswith(SOURCE) and _is_of_a_request(frame):
            module = name.removeprefix(SOURCE).removesuffix(".py").replace(os.sep, ".")
            self.entered.setdefault(module, set()).add(frame.f_code.co_qualname)


def _is_of_a_request(frame: FrameType) -> bool:
    """Whether the loop entered us through the gateway, and not on the way to the rest of the daemon."""
    entry = None
    above: FrameType | None = frame
    while above is not None:
        code = above.f_code
        if code.co_filename.startswith(SOURCE) and code.co_name not in STARTING:
            entry = code
            if code.co_name == FALLBACK:
                return False
        above = above.f_back
    return entry is not None and entry.co_filename.startswith(GATEWAY) and entry.co_name not in TIMERS


if __name__ == "__main__":
    walk = Walk()
    path = os.environ["AIMGPU_TEST_WALK"]
    threading.Thread(target=walk.begin_on, args=(Path(f"{path}.begin"),), daemon=True).start()
    sys.setprofile(walk)
    try:
        status = main(make_dependencies)
    finally:
        sys.setprofile(None)
        found = {module: sorted(names) for module, names in sorted(walk.entered.items())}
        Path(path).write_text(json.dumps(found))
    sys.exit(status)
