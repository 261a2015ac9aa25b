"""The libraries of a wheel: built twice with the same bytes, for two architectures, run under an old C library, and checked."""

import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.debian_packages import unpack
from tests.native.conftest import ARM64_ROOT, ARM64_RUNNER, Rig
from tests.native.test_platforms import BULLSEYE

from aimgpu.errors import HardwareUnavailable
from aimgpu.isolation import building, prebuilt
from aimgpu.units import GIB

ROOT = Path(__file__).parents[2]
MOST_BYTES = 3 << 20  # of a wheel without an engine


def make_wheel(machine: str, folder: Path) -> Path:
    environment = {**os.environ, "AIMGPU_WHEEL": machine}
    command = [str(ROOT / "tools" / "uv.sh"), "build", "--wheel", "--quiet", "--out-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(machine: str) -> Path:
        if machine not in made:
            made[machine] = make_wheel(machine, tmp_path_factory.mktemp(machine))
        return made[machine]

    return get


def libraries(wheel: Path, folder: Path) -> Path:
    """Where the libraries of a wheel lie once it is unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    machine = wheel.stem.removeprefix("aimgpu-").split("manylinux2014_")[1]
    return folder / "aimgpu" / "_native" / prebuilt.FOLDER / machine


@pytest.mark.rest
@pytest.mark.parametrize("machine", prebuilt.MACHINES)
def test_a_wheel_is_small_and_needs_symbols_of_glibc_2_17_at_most(
    machine: str, wheels: Callable[[str], Path], tmp_path: Path
) -> None:
    wheel = wheels(machine)
    assert wheel.name.endswith(f"-py3-none-manylinux2014_{machine}.whl")
    assert wheel.stat().st_size <= MOST_BYTES
    folder = libraries(wheel, tmp_path)
    command = [str(ROOT / "tools" / "uv.sh"), "run", "--quiet", "--frozen", "--only-group", "prebuilt", "--isolated"]
    said = subprocess.run([*command, "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert f"manylinux_2_17_{machine}" in said.stdout, said.stdout
    needed = subprocess.run(["readelf", "-d", folder / building.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "libdl.so.2" in needed  # before glibc 2.34 dlsym is there alone
    for path in folder.glob("*.so*"):
        assert str(ROOT).encode() not in path.read_bytes()


@pytest.mark.rest
def test_two_builds_give_the_same_bytes(wheels: Callable[[str], Path], tmp_path: Path) -> None:
    again = make_wheel("x86_64", tmp_path)
    first = wheels("x86_64")
    assert hashlib.sha256(first.read_bytes()).hexdigest() == hashlib.sha256(again.read_bytes()).hexdigest()


@pytest.mark.rest
def test_the_library_of_the_wheel_holds_a_cap_under_glibc_2_31(rig: Any, wheels: Callable[[str], Path], tmp_path: Path) -> None:
    """With the software GPU of the same wheel, by a program that was linked for this machine's kind only."""
    folder = libraries(wheels("x86_64"), tmp_path)
    rig.admit(cap_bytes=10 * GIB)
    root = unpack("debian-11", BULLSEYE)
    development, old = (next((root / place).glob("x86_64-linux-gnu")) for place in ("usr/lib", "lib"))
    (linker,) = old.glob("ld-linux-*.so.*")
    program = tmp_path / "program"
    (tmp_path / "program.c").write_text(ALLOCATES)
    flags = (f"--sysroot={root}", f"-B{development}", "-nodefaultlibs", "-Wl,--allow-shlib-undefined")
    linked = (folder / "libcuda.so.1", old / "libc.so.6", development / "libc_nonshared.a")
    subprocess.run(["cc", *flags, "-o", program, tmp_path / "program.c", *linked], check=True)
    environment = rig.environment() | {"LD_LIBRARY_PATH": "", "LD_PRELOAD": str(folder / building.LIBRARY)}
    command = [str(linker), "--library-path", f"{old}:{folder}"]
    for run, said in ((program, "000000000022"), (root / "bin/cat", "8.32")):
        words = [*command, str(run), *(["--version"] if run is not program else [])]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    assert rig.driver.peak == 10 * GIB


@pytest.mark.rest
@pytest.mark.skipif(shutil.which(ARM64_RUNNER) is None or not Path(ARM64_ROOT).exists(), reason="no qemu-user for arm64")
def test_the_library_of_the_wheel_holds_a_cap_on_arm64(
    make_rig: Callable[[str], Rig], wheels: Callable[[str], Path], tmp_path: Path
) -> None:
    rig = make_rig("arm64")
    folder = libraries(wheels("aarch64"), tmp_path)
    for path in folder.glob("*.so*"):
        shutil.copy(path, rig.tools.folder / path.name)
    rig.admit(cap_bytes=1 * GIB)
    hammer = rig.tools.folder / "hammer"
    if not hammer.exists():
        rig.tools.program("hammer", link=("libcuda.so.1",))
    process = rig.start(hammer, "greedy", 4, 4 << 20)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == rig.driver.peak == rig.used() == 1 * GIB


ALLOCATES = """
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


def lay_beside(sources: Path, tmp_path: Path, content: bytes = b"a library") -> tuple[Path, Path]:
    """A copy of the source with a prebuilt file, as a wheel has them."""
    copy = tmp_path / "_native"
    shutil.copytree(sources, copy)
    folder = copy / prebuilt.FOLDER / os.uname().machine
    folder.mkdir(parents=True)
    library = folder / building.LIBRARY
    library.write_bytes(content)
    (folder / prebuilt.HASHES).write_text(f"{hashlib.sha256(content).hexdigest()}  {library.name}\n")
    return copy, library


def test_a_prebuilt_library_is_used_and_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, library = lay_beside(building.find_sources(), tmp_path)
    monkeypatch.setattr(building, "find_sources", lambda: copy)
    monkeypatch.delenv("AIMGPU_INTERPOSER", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no compiler
    assert building.why_unavailable(tmp_path / "cache") is None
    assert building.find_interposer(tmp_path / "cache") == library
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("AIMGPU_BUILD_NATIVE", "1")
    assert building.why_unavailable(tmp_path / "cache") == "no C compiler to build the interposer with"


def test_a_prebuilt_library_that_was_changed_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, library = lay_beside(building.find_sources(), tmp_path)
    monkeypatch.setattr(building, "find_sources", lambda: copy)
    monkeypatch.delenv("AIMGPU_INTERPOSER", raising=False)
    library.write_bytes(b"another library")
    with pytest.raises(HardwareUnavailable, match="its hash differs"):
        building.find_interposer(tmp_path / "cache")
    assert "its hash differs" in str(building.why_unavailable(tmp_path / "cache"))
