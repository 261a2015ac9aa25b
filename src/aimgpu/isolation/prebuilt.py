"""The libraries that we built once for everybody: made for a wheel, and checked by their hashes before they are loaded.

One compiler builds for both architectures, against the symbols of glibc 2.17, so that a library runs in any container that has
glibc. Nothing of the building machine is in it: two builds give the same bytes.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from aimgpu.errors import HardwareUnavailable

FOLDER = "prebuilt"
HASHES = "SHA256SUMS"
MACHINES = ("x86_64", "aarch64")
_COMPILER = (sys.executable, "-m", "ziglang", "cc")
_FLAGS = (
    *("-std=gnu11", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-sanitize=all"),
    *(
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wl,-Bsymbolic",
        "-Wl,-z,now",
        "-Wl,--no-undefined",
        "-Wl,-s",
        "-Wl,--build-id=none",
        "-Wl,--no-as-needed",
    ),
)


def build_prebuilt(sources: Path, folder: Path, machine: str) -> list[Path]:
    """The interposer and the software GPU for one architecture, and the file with their hashes."""
    from aimgpu.isolation.building import CHECKER, CHECKER_FLAGS, LIBRARY, SOFTWARE_GPU, SOFTWARE_GPU_PARTS  # noqa: PLC0415 - it imports this module

    if machine not in MACHINES:
        raise HardwareUnavailable(
            f"there is no prebuilt library for {machine}", hint=f"There is one for {', '.join(MACHINES)}."
        )
    gpu = sources / "software_gpu"
    inputs = {LIBRARY: sorted(sources.glob("*.c"))}
    inputs |= {name: [*(gpu / part for part in SOFTWARE_GPU_PARTS), gpu / own] for name, own in SOFTWARE_GPU.items()}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        target = (*_COMPILER, "-target", f"{machine}-linux-gnu.2.17")
        # Its linker leaves out a libdl that nothing asks for, and before glibc 2.34 dlsym and dlopen are there alone.
        libdl = Path(cache) / "libdl.so.2"
        (Path(cache) / "libdl.c").write_text("void aimgpu_no_such_function(void) {}\n")
        _compile(
            [*target, "-shared", "-nostdlib", "-Wl,-soname,libdl.so.2", "-o", str(libdl), str(libdl.with_name("libdl.c"))],
            cache,
            environment,
        )
        for name, files in inputs.items():
            relative = [os.path.relpath(path, sources) for path in files]
            command = [*target, *_FLAGS, f"-Wl,-soname,{name}", "-o", str(folder / name), *relative]
            # The interposer is loaded at the start; what is loaded later finds no room for such variables.
            command += ["-ftls-model=initial-exec", "-Wl,-e,aim_run", str(libdl)] if name == LIBRARY else ["-ldl"]
            command += ["-lpthread"]
            _compile(command, str(sources), environment)
        static = (
            *_COMPILER,
            "-target",
            f"{machine}-linux-musl",
            *CHECKER_FLAGS,
            "-Werror",
            "-g0",
            "-Wl,-s",
            "-Wl,--build-id=none",
        )
        _compile([*static, "-o", str(folder / CHECKER), os.path.join("container", "check.c")], str(sources), environment)  # noqa: PTH118
    made = [folder / name for name in (*inputs, CHECKER)]
    hashes = folder / HASHES
    hashes.write_text("".join(f"{_hash(path)}  {path.name}\n" for path in made))
    return [*made, hashes]


def find_prebuilt(sources: Path, name: str) -> Path | None:
    """The library of this name for this machine, checked; None where none lies beside the source.

    Raises HardwareUnavailable where it is not the file that was built: it would be loaded into every program.
    """
    path = sources / FOLDER / os.uname().machine / name
    if os.environ.get("AIMGPU_BUILD_NATIVE") == "1" or not path.is_file() or not _has_glibc():
        return None
    listed = (path.parent / HASHES).read_text(encoding="ascii").splitlines()
    if f"{_hash(path)}  {name}" not in listed:
        raise HardwareUnavailable(
            f"{path} is not the file that was built: its hash differs", hint="Reinstall aimgpu, or set AIMGPU_BUILD_NATIVE=1."
        )
    return path


def _has_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (ValueError, OSError):
        return False


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(command: list[str], folder: str, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if done.returncode != 0:
        raise HardwareUnavailable(f"a prebuilt library does not compile: {done.stderr[-500:]}")
