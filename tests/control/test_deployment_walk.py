"""Which modules one deployment crosses. `python -m tests.control.test_deployment_walk` writes the page from a real run."""

import importlib.util
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from tests.control.world import Machine, boot, deployment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "walk-deployment.md"
LAYERS = ("control", "hardware", "isolation", "engines", "ledger", "placement", "qos", "sizing", "domain")
LEAVES = ("units", "errors", "files", "procfs", "logs", "settings", "home")
HEAD = """# The modules that one deployment crosses

Traced while a controller applied a stack of one model on a simulated GPU, until it was ready. A test checks that this list is
complete, that nothing above control is in it, and that control is entered once, by `Controller.apply`. The engine, the launcher
and the sizing of the model are stand-ins here; a real one adds the modules of its own room.
"""


class Walk:
    """Modules entered, and the calls by which control was entered from outside."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.entries: list[str] = []

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("aimgpu."):
            return
        self.modules.add(name.removeprefix("aimgpu."))
        caller = str(frame.f_back.f_globals.get("__name__", "")) if frame.f_back else ""
        outside = caller == __name__ or (caller.startswith("aimgpu.") and not caller.startswith("aimgpu.control"))
        if name.startswith("aimgpu.control") and outside:
            self.entries.append(frame.f_code.co_qualname)


def walk(folder: Path) -> Walk:
    found = Walk()
    machine = Machine(folder)
    threading.setprofile(found)  # for the threads that start engines
    try:
        controller = boot(machine)
        wanted = [deployment("chat", 10)]
        found.modules.clear()
        found.entries.clear()
        sys.setprofile(found)
        try:
            controller.apply(wanted)
        finally:
            sys.setprofile(None)
        entries = list(found.entries)
        controller.close()
    finally:
        threading.setprofile(None)
    found.entries = entries
    return found


def test_control_is_entered_once_and_nothing_above_it_is_crossed(tmp_path: Path) -> None:
    found = walk(tmp_path)
    assert found.entries == ["Controller.apply"]
    assert {module for module in found.modules if module.split(".")[0] not in (*LAYERS, *LEAVES)} == set()
    assert {"control.controller", "ledger.store", "placement.decide"} <= found.modules


def test_the_page_shows_the_walk_as_it_is(tmp_path: Path) -> None:
    listed = [line.removeprefix("- `").removesuffix("`") for line in PAGE.read_text().splitlines() if line.startswith("- `")]
    assert walk(tmp_path).modules - set(listed) == set(), "run `python -m tests.control.test_deployment_walk`"
    assert [module for module in listed if importlib.util.find_spec(f"aimgpu.{module}") is None] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        rows = [f"- `{module}`" for module in sorted(walk(Path(temporary)).modules)]
    PAGE.write_text("\n".join([HEAD, *rows, ""]))
