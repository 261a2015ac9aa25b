"""What the library needs of a platform: no newer C library than it must, and nothing beside it."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.debian_packages import unpack

from aimgpu.isolation import building
from aimgpu.units import GIB


def test_only_driver_functions_and_those_of_the_dynamic_linker_are_exported(toolchains: Callable[[str], Any]) -> None:
    """A preloaded library is in everybody's way: it must offer nothing by accident."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", toolchains("plain").interposer], check=True, capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    hooks = set(re.findall(r"^HOOK\((\w+),", (building.find_sources() / "functions.def").read_text(), re.MULTILINE))
    assert names == hooks | {"dlsym", "dlvsym", "dlopen", "dlmopen"} | {"aimgpu_attach"}  # for prepared processes


def test_it_links_nothing_but_the_c_library(toolchains: Callable[[str], Any]) -> None:
    said = subprocess.run(["readelf", "-d", toolchains("plain").interposer], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_it_loads_on_old_systems(toolchains: Callable[[str], Any]) -> None:
    """Symbols of glibc 2.17 at most, so that it can be mounted into a container with an older C library than this machine's."""
    said = subprocess.run(["nm", "-D", toolchains("plain").interposer], check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, version.split("."))) for version in re.findall(r"@GLIBC_([0-9.]+)", said)}
    assert max(versions) <= (2, 17)


def test_a_container_whose_loader_cannot_load_the_library_is_refused_with_the_reason(
    toolchains: Callable[[str], Any], tmp_path: Path
) -> None:
    """The loader runs the library as a program: what it lacks is reported, and no program of the container has started."""
    library = toolchains("plain").interposer
    header = subprocess.run(["readelf", "-l", "/bin/true"], check=True, capture_output=True, text=True).stdout
    (loader,) = re.findall(r"interpreter: (.*)\]", header)
    assert loader == str(building.find_loader())

    def check(*words: str | Path) -> tuple[int, str]:
        done = subprocess.run([building.find_checker(), *words], check=False, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert check(loader, library) == (0, "")
    assert (
        subprocess.run(["readelf", "-l", building.find_checker()], check=True, capture_output=True, text=True).stdout.count(
            "INTERP"
        )
        == 0
    )  # it needs no loader itself
    other = tmp_path / "libaimgpu.so"
    newer = library.read_bytes().replace(b"GLIBC_2.17\0", b"GLIBC_9.99\0")  # by name: the loader compares hashes first
    at = newer.find(_elf_hash(b"GLIBC_2.17"))
    while at >= 0:
        newer = newer[:at] + _elf_hash(b"GLIBC_9.99") + newer[at + 4 :]
        at = newer.find(_elf_hash(b"GLIBC_2.17"))
    other.write_bytes(newer)
    status, text = check(loader, other)
    assert status == 1
    assert "version `GLIBC_9.99' not found" in text
    status, text = check(tmp_path / "ld-none.so", library)
    assert status == 1
    assert "its image has no glibc" in text


def _elf_hash(name: bytes) -> bytes:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value.to_bytes(4, "little")


# Debian 11: glibc 2.31, in which the functions of the dynamic linker are in a library of their own.
BULLSEYE = ("libc6/bullseye", "libc6-dev/bullseye", "linux-libc-dev/bullseye", "coreutils/bullseye")
OLD_DRIVER = "int cuMemAlloc_v2(unsigned long *pointer, unsigned long bytes) { return *pointer = bytes, 0; }"
OLD_PROGRAM = """
#include <stdio.h>
int cuMemAlloc_v2(unsigned long *pointer, unsigned long bytes);
int main(void)
{
    unsigned long pointer;
    for (int i = 0; i < 12; i++)
        printf("%d", cuMemAlloc_v2(&pointer, 1ul << 30));
    return 0;
}
"""


def test_programs_run_and_are_held_under_the_c_library_of_debian_11(rig: Any, tmp_path: Path) -> None:
    """Both a program that links no library but C's, and one that allocates twelve GiB of a cap of ten."""
    rig.admit(cap_bytes=10 * GIB)
    root = unpack("debian-11", BULLSEYE)
    development, libraries = (next((root / folder).glob("*-linux-gnu")) for folder in ("usr/lib", "lib"))
    (linker,) = libraries.glob("ld-linux-*.so.*")
    driver, program = tmp_path / "libcuda.so.1", tmp_path / "program"
    (tmp_path / "driver.c").write_text(OLD_DRIVER)
    (tmp_path / "program.c").write_text(OLD_PROGRAM)
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-o", driver, tmp_path / "driver.c"], check=True)
    old = (f"--sysroot={root}", f"-B{development}", "-nodefaultlibs")
    c_library = (libraries / "libc.so.6", development / "libc_nonshared.a")
    subprocess.run(["cc", *old, "-o", program, tmp_path / "program.c", driver, *c_library], check=True)

    def run(*command: object) -> str:
        environment = rig.environment() | {"LD_LIBRARY_PATH": ""}
        done = subprocess.run(
            [linker, "--library-path", f"{libraries}:{tmp_path}", *map(str, command)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "8.32" in run(root / "bin/cat", "--version")
    assert run(program) == "000000000022"
