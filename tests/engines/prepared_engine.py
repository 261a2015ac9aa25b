"""Programs of Python with slow imports, as vLLM is one: what a prepared process may become."""

import sys
from dataclasses import replace
from pathlib import Path

from tests.programs import engine

from aimgpu.engines.protocols import Command, PreparedImports

PREPARATION = PreparedImports(modules=("slow_packages", "http.server"), varying=("HIP_", "LAZY_"))


def write_program(folder: Path, text: str, packages: str = "") -> Path:
    """A script as pip installs it, with a module `slow_packages` that knows which process imported it, and when."""
    folder.mkdir(exist_ok=True)
    (folder / "slow_packages.py").write_text(f"import os\nIMPORTED_BY = os.getpid()\n{packages}\n")
    program = folder / "engine"
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    return program


def prepare(command: Command, folder: Path) -> Command:
    """The scripted engine, as a program that a prepared process may become."""
    program = folder / "engine"
    if not program.exists():  # one that is starting may be reading it
        write_program(folder, engine.PROGRAM.read_text())
    return replace(command, argv=(str(program), *command.argv[2:]), preparation=PREPARATION)
