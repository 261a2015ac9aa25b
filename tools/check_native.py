"""Compiles the interposer and the software GPU with every C compiler that is here, warnings as errors, and runs cppcheck.

`--all` fails where gcc, clang or cppcheck is missing (CI); without it a missing one is named and left out.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from aimgpu.isolation.building import CHECKER_FLAGS, FLAGS, LIBRARIES, software_gpu_commands  # noqa: E402 the path is set above

WARNINGS = (
    *("-Werror", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Wmissing-prototypes"),
    *("-Wformat=2", "-Wundef", "-Wcast-qual", "-Wwrite-strings", "-Wpointer-arith"),
)
COMPILERS = ("gcc", "clang", "aarch64-linux-gnu-gcc")
CPPCHECK = ("--enable=warning,performance,portability", "--std=c11", "--inline-suppr", "--error-exitcode=1", "--quiet")


def main() -> int:
    """0 where everything that is here compiled without a warning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="fail where a tool is missing")
    needed = (*COMPILERS, "cppcheck") if parser.parse_args().all else ()
    failed = [tool for tool in needed if shutil.which(tool) is None]
    for tool in (*COMPILERS, "cppcheck"):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed: not checked with it")
    with tempfile.TemporaryDirectory() as folder:
        commands = [command for compiler in COMPILERS for command in compile_commands(compiler, Path(folder))]
        commands.append(["cppcheck", *CPPCHECK, str(ROOT / "native")])
        failed += [command[0] for command in commands if shutil.which(command[0]) and not succeeds(command)]
    return 1 if failed else 0


def compile_commands(compiler: str, folder: Path) -> list[list[str]]:
    """The library with all warnings, the check of images, and the software GPU."""
    sources = sorted(map(str, (ROOT / "native").glob("*.c")))
    return [
        [compiler, *FLAGS, *WARNINGS, "-o", str(folder / "library.so"), *sources, *LIBRARIES],
        [compiler, *CHECKER_FLAGS, *WARNINGS, "-o", str(folder / "check"), str(ROOT / "native" / "container" / "check.c")],
        *software_gpu_commands(compiler, ROOT / "native", folder, "-Werror"),
    ]


def succeeds(command: list[str]) -> bool:
    """Runs it; what it printed is shown where it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 our own compilers and files
    if done.returncode != 0:
        print(" ".join(command[:1]), "failed:", done.stdout, done.stderr, sep="\n")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
