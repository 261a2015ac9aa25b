"""The interposer and the software GPU: as the wheel carries them, else built here by the machine's compiler.

What is built here lies in the user's cache, keyed by its source.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from aimgpu.errors import HardwareUnavailable
from aimgpu.files import cache_directory
from aimgpu.isolation.prebuilt import find_prebuilt

FLAGS = (
    *("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ftls-model=initial-exec", "-Wl,-Bsymbolic-functions", "-Wl,-z,now", "-Wl,--no-undefined"),
    "-Wl,-e,aim_run",
)
# libdl by its file name and in any case: before glibc 2.34 it has dlsym and dlopen, and newer systems leave it out.
LIBRARIES = ("-Wl,--no-as-needed", "-l:libdl.so.2", "-lpthread")
LIBRARY = "libaimgpu.so"
CHECKER = "aimgpu-check"
CHECKER_FLAGS = ("-std=gnu11", "-O2", "-static", "-Wall", "-Wextra")
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
SOFTWARE_GPU_PARTS = ("memory.c", "blocks.c", "work.c")
SOFTWARE_GPU = {
    "libcuda.so.1": "cuda.c",
    "libamdhip64.so.7": "hip.c",
    "libnvidia-ml.so.1": "nvml.c",
    "libhiprtc.so.7": "hiprtc.c",
}
SOFTWARE_GPU_FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_OVERRIDE = "AIMGPU_INTERPOSER"
_BUILD_SECONDS = 120
_NO_COMPILER = "no C compiler to build the interposer with"


def find_interposer(cache: Path | None = None) -> Path:
    """The library, built here if need be. Raises HardwareUnavailable with the reason where it is not available."""
    given = os.environ.get(_OVERRIDE)
    if given is not None:
        if not Path(given).is_file():
            raise HardwareUnavailable(
                f"{_OVERRIDE} names {given}, which is not there", hint="Unset it to build the library here."
            )
        return Path(given)
    sources = find_sources()
    prebuilt = find_prebuilt(sources, LIBRARY)
    if prebuilt is not None:
        return prebuilt
    target = (cache or cache_directory() / "native") / source_hash(sources) / LIBRARY
    if not target.is_file():
        build(sources, target)
    return target


def find_checker(cache: Path | None = None) -> Path:
    """The program that refuses a container which cannot load the library. Raises as `find_interposer` does."""
    sources = find_sources()
    if (prebuilt := find_prebuilt(sources, CHECKER)) is not None:
        return prebuilt
    target = (cache or cache_directory() / "native") / source_hash(sources / "container") / CHECKER
    if not target.is_file():
        compiler = _find_compiler()
        if compiler is None:
            raise HardwareUnavailable(_NO_COMPILER, hint="Install gcc or clang.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder) / target.name
            _run([compiler, *CHECKER_FLAGS, "-o", str(fresh), str(sources / "container" / "check.c")], "the check of images")
            fresh.rename(target)
    return target


def find_loader() -> Path:
    """glibc's, by its path in every image that has one."""
    return Path(LOADERS[os.uname().machine])


def find_software_gpu(cache: Path | None = None) -> Path:
    """The folder with the libraries of the software GPU, built if need be. Raises HardwareUnavailable where it cannot be."""
    sources = find_sources()
    prebuilt = [find_prebuilt(sources, name) for name in SOFTWARE_GPU]
    if prebuilt[0] is not None:
        return prebuilt[0].parent
    target = (cache or cache_directory() / "native") / source_hash(sources / "software_gpu") / "software_gpu"
    if not target.is_dir():
        compiler = _find_compiler()
        if compiler is None:
            raise HardwareUnavailable(_NO_COMPILER, hint="Install gcc or clang.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder) / target.name
            fresh.mkdir()
            for command in software_gpu_commands(compiler, sources, fresh):
                _run(command, "the software GPU")
            with contextlib.suppress(OSError):  # another process was faster
                fresh.rename(target)
    return target


def software_gpu_commands(compiler: str, sources: Path, folder: Path, *flags: str) -> list[list[str]]:
    """How the libraries of the software GPU are compiled into a folder: what programs load in place of a vendor's driver."""
    gpu = sources / "software_gpu"
    parts = [str(gpu / name) for name in SOFTWARE_GPU_PARTS]
    return [
        [
            compiler,
            *SOFTWARE_GPU_FLAGS,
            *flags,
            f"-Wl,-soname,{name}",
            "-o",
            str(folder / name),
            *parts,
            str(gpu / own),
            *LIBRARIES,
        ]
        for name, own in SOFTWARE_GPU.items()
    ]


def why_unavailable(cache: Path | None = None) -> str | None:
    """Whether `find_interposer` could succeed, without building anything; None: it could."""
    given = os.environ.get(_OVERRIDE)
    if given is not None:
        return None if Path(given).is_file() else f"{_OVERRIDE} names {given}, which is not there"
    try:
        sources = find_sources()
        if find_prebuilt(sources, LIBRARY) is not None:
            return None
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
    raise HardwareUnavailable("the interposer's source is not installed", hint="Reinstall aimgpu.")


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
        _run(command, "the interposer")
        fresh.rename(target)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)  # noqa: S603
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-3:]
        raise HardwareUnavailable(f"{what} does not compile: {' | '.join(last)}", hint=f"Command: {' '.join(command)}")
