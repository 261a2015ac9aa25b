"""The program `vllm` of this machine: whether it is there, which version, which flags it takes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from aimgpu.engines.endpoint import write_whole
from aimgpu.engines.protocols import Availability
from aimgpu.errors import EngineFailed

_FLAG = re.compile(r"^\s+(?:-\w+, )?--([a-z][a-z0-9-]+)", re.MULTILINE)
_MORE_FLAGS = re.compile(r", --([a-z][a-z0-9-]+)")
_LIST_SECONDS = 180.0  # it imports torch first


def find_vllm(program: str) -> Availability:
    """Whether the program is installed, and which version."""
    path = shutil.which(program)
    if path is None:
        return Availability(
            available=False,
            reason=f"the program {program!r} is not on PATH",
            hint="pip install vllm, or use --launcher docker.",
        )
    version = _installed_version(Path(path)) or _printed_version(path)
    if version is None:
        return Availability(available=False, reason=f"{path} does not print its version", hint=f"Try: {path} --version")
    return Availability(available=True, version=version, where=path)


def list_flags(program: str, version: str, cache_directory: Path) -> frozenset[str] | None:
    """All flags of `vllm serve`, without dashes. Asked once per program and version: it takes many seconds. None: not known."""
    remembered = cache_directory / "flags" / f"vllm-{version}.json"
    try:
        known = json.loads(remembered.read_bytes())
        if known["program"] == program:
            return frozenset(known["flags"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    flags = parse_help(_run(program, "serve", "--help=all", seconds=_LIST_SECONDS) or "")
    if not flags:
        return None
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        write_whole(remembered, {"program": program, "flags": sorted(flags)})
    except (OSError, EngineFailed):
        return flags  # a cache that cannot be written costs the next start one more question
    return flags


def parse_help(text: str) -> frozenset[str]:
    """The flags that a line of the help begins with, and their aliases on the same line."""
    found = set(_FLAG.findall(text))
    for line in text.splitlines():
        if _FLAG.match(line):
            found.update(_MORE_FLAGS.findall(line))
    return frozenset(found)


def _installed_version(program: Path) -> str | None:
    """The version in the package metadata; running the program would import torch, which takes many seconds."""
    found = program.resolve().parent.parent.glob("lib/python3*/site-packages/vllm-*.dist-info")
    names = [path.name.removesuffix(".dist-info").removeprefix("vllm-") for path in found]
    return names[0] if names else None


def _printed_version(program: str) -> str | None:
    words = (_run(program, "--version", seconds=120.0) or "").split()
    return words[-1] if words else None


def _run(*argv: str, seconds: float) -> str | None:
    try:
        result = subprocess.run(argv, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - the engine itself
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode("utf-8", "replace") if result.returncode == 0 else None
