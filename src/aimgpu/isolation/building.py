"""Builds the interposer with the machine's C compiler on first use, into the user's cache, keyed by its source.

A wheel that carries a binary would have to match every glibc and architecture; the source is small, and matches.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from aimgpu.errors import HardwareUnavailable
from aimgpu.files import cache_directory

FLAGS = (
    *("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ftls-model=initial-exec", "-Wl,-Bsymbolic-functions", "-Wl,-z,now", "-Wl,--no-undefined"),
)
LIBRARIES = ("-ldl", "-lpthread")
LIBRARY = "libaimgpu.so"
_OVERRIDE = "AIMGPU_INTERPOSER"
_BUILD_SECONDS = 120
_NO_COMPILER = "no C compiler to build the interposer with"


def find_interposer(cache: Path | None = None) -> Path:
    """The library, built if need be. Raises HardwareUnavailable with the reason where it cannot be had."""
    given = os.environ.get(_OVERRIDE)
    if given is not None:
        if not Path(given).is_file():
            raise HardwareUnavailable(
                f"{_OVERRIDE} names {given}, which is not there", hint="Unset it to build the library here."
            )
        return Path(given)
    sources = find_sources()
    target = (cache or cache_directory() / "native") / source_hash(sources) / LIBRARY
    if not target.is_file():
        build(sources, target)
    return target


def why_unavailable(cache: Path | None = None) -> str | None:
    """Whether `find_interposer` could succeed, without building anything; None: it could."""
    given = os.environ.get(_OVERRIDE)
    if given is not None:
        return None if Path(given).is_file() else f"{_OVERRIDE} names {given}, which is not there"
    try:
        sources = find_sources()
    except HardwareUnavailable as error:
        return error.message
    built = (cache or cache_directory() / "native") / source_hash(sources) / LIBRARY
    return None if built.is_file() or _find_compiler() is not None else _NO_COMPILER


def _find_compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")


def find_sources() -> Path:
    """`native/` of a checkout, or the copy that the wheel carries."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_native", package.parent.parent / "native"):
        if (folder / "region.h").is_file():
            return folder
    raise HardwareUnavailable("the interposer's source is not installed", hint="Reinstall aim-gpu-sharing.")


def source_hash(sources: Path) -> str:
    """Identifies the library by its source and the flags it is built with."""
    digest = hashlib.sha256(" ".join((*FLAGS, *LIBRARIES, os.uname().machine)).encode())
    for path in sorted(sources.iterdir()):
        if path.suffix in (".c", ".h", ".def"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(sources: Path, target: Path, *extra: str) -> None:
    """Compile into `target`, whole or not at all."""
    compiler = _find_compiler()
    if compiler is None:
        raise HardwareUnavailable(_NO_COMPILER, hint="Install gcc or clang.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        files = [str(path) for path in sorted(sources.glob("*.c"))]
        command = [compiler, *FLAGS, *extra, "-o", str(fresh), *files, *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)  # noqa: S603 our own source
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-3:]
            raise HardwareUnavailable(
                f"the interposer does not compile: {' | '.join(last)}", hint=f"Command: {' '.join(command)}"
            )
        fresh.rename(target)
