"""What the library needs of a platform: no newer C library than it must, and nothing beside it."""

import re
import subprocess
from collections.abc import Callable
from typing import Any

from aimgpu.isolation import building


def test_only_driver_functions_and_those_of_the_dynamic_linker_are_exported(toolchains: Callable[[str], Any]) -> None:
    """A preloaded library is in everybody's way: it must offer nothing by accident."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", toolchains("plain").interposer], check=True, capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    hooks = set(re.findall(r"^HOOK\((\w+),", (building.find_sources() / "functions.def").read_text(), re.MULTILINE))
    assert names == hooks | {"dlsym", "dlopen", "dlmopen"}


def test_it_links_nothing_but_the_c_library(toolchains: Callable[[str], Any]) -> None:
    said = subprocess.run(["readelf", "-d", toolchains("plain").interposer], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_it_loads_on_old_systems(toolchains: Callable[[str], Any]) -> None:
    """Symbols of glibc 2.17 at most, so that it can be mounted into a container with an older C library than this machine's."""
    said = subprocess.run(["nm", "-D", toolchains("plain").interposer], check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, version.split("."))) for version in re.findall(r"@GLIBC_([0-9.]+)", said)}
    assert max(versions) <= (2, 17)
