"""Builds the interposer and the drivers that are not there, and starts real processes against them."""

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.cache import cached

from aimgpu.hardware.software.state import DriverState
from aimgpu.isolation import building
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
SOFTWARE_GPU = building.find_sources() / "software_gpu"
SANITIZERS = {
    "plain": (),
    "arm64": (),
    "asan": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "tsan": ("-fsanitize=thread",),
}
ARM64_COMPILER, ARM64_RUNNER, ARM64_ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"


class Toolchain:
    """Libraries and programs of one kind of build."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.flags = SANITIZERS[kind]
        self.compiler = ARM64_COMPILER if kind == "arm64" else "cc"
        self.interposer = folder / building.LIBRARY
        for one in cached(f"toolchain-{self._digest()}", self._build).iterdir():
            shutil.copy(one, folder)

    def _digest(self) -> str:
        version = subprocess.run([self.compiler, "--version"], check=True, capture_output=True, text=True).stdout
        made_of = [
            building.source_hash(building.find_sources()),
            building.source_hash(SOFTWARE_GPU),
            *building.SOFTWARE_GPU_FLAGS,
        ]
        return hashlib.sha256(" ".join([*made_of, *self.flags, version]).encode()).hexdigest()[:16]

    def _build(self, folder: Path) -> None:
        """Once for all workers, and again where a source, the compiler or a flag changed."""
        sources, library = sorted(map(str, building.find_sources().glob("*.c"))), str(folder / building.LIBRARY)
        self._run(*building.FLAGS, "-Werror", *self.flags, "-o", library, *sources, *building.LIBRARIES)
        for command in building.software_gpu_commands(self.compiler, building.find_sources(), folder, "-Werror", *self.flags):
            self._run(*command[1:])

    def program(self, name: str, *, link: tuple[str, ...] = (), source: str | None = None) -> Path:
        """A C program; with `link` it names the drivers itself, with the interposer before them."""
        path = PROGRAMS / f"{name}.c"
        if source is not None:
            path = self.folder / f"{name}.c"
            path.write_text(source)
        libraries = [str(self.folder / library) for library in link]
        return self._compile(name, str(path), *libraries, f"-Wl,-rpath,{self.folder}")

    def _compile(self, name: str, *arguments: str) -> Path:
        target = self.folder / name
        flags = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *self.flags)
        self._run(*flags, "-o", str(target), *arguments, "-lpthread", "-ldl")
        return target

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([self.compiler, *arguments], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


PUPPET = PROGRAMS / "puppet.py"
MILLISECOND = 1_000_000


class Puppet:
    """A tenant's process that runs the commands of programs/puppet.py."""

    def __init__(self, rig: "Rig", tenant: str, **more: str) -> None:
        self.process = rig.start(PUPPET, tenant=tenant, **more)
        self.pid = self.process.pid

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer.startswith("ok"), (answer, self.process.stderr.read() if self.process.stderr else "")
        return int(answer[2:].strip() or 0)

    def do(self, command: str) -> int:
        self.tell(command)
        return self.wait()


class Rig:
    """One Device: a region, a driver that counts, and tenants that are real processes."""

    def __init__(self, folder: Path, tools: Toolchain) -> None:
        self.folder = folder
        self.tools = tools
        self.region = Region.create(folder / "device.region", device_bytes=80 * GIB, device="GPU-software")
        path = folder / "driver.state"
        path.write_bytes(bytes(ctypes.sizeof(DriverState)))
        self.state_path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.driver = DriverState.from_buffer(self._map)
        self.driver.device_bytes = 80 * GIB
        self._started: list[subprocess.Popen[str]] = []

    def admit(self, name: str = "tenant", cap_bytes: int = 10 * GIB, **limits: object) -> None:
        self.region.admit(TenantLimits(name=name, cap_bytes=cap_bytes, **{"rounding_bytes": 1, **limits}))  # type: ignore[arg-type]

    def environment(self, tenant: str = "tenant", **more: str) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith("AIMGPU_")},
            "AIMGPU_REGION": str(self.region.path),
            "AIMGPU_TENANT": tenant,
            "LD_PRELOAD": str(self.tools.interposer),
            "LD_LIBRARY_PATH": str(self.tools.folder),
            "AIMGPU_SOFTWARE_GPU": str(self.state_path),
            **more,
        }

    def start(self, *command: object, tenant: str = "tenant", **more: str) -> "subprocess.Popen[str]":
        words = [str(word) for word in command]
        environment = self.environment(tenant, **more)
        if Path(words[0]).suffix == ".py":
            words = [sys.executable, "-I", *words]
        elif self.tools.kind == "arm64":  # for the emulated program alone: the emulator itself is of this machine's kind
            inside = [f"{name}={environment.pop(name)}" for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")]
            words = [ARM64_RUNNER, "-L", ARM64_ROOT, *(word for one in inside for word in ("-E", one)), *words]
        elif self.tools.kind != "plain":
            environment.pop("LD_PRELOAD")  # linked instead: a sanitizer must come first
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._started.append(process)
        return process

    def run(self, *command: object, tenant: str = "tenant", **more: str) -> str:
        out, err = self.start(*command, tenant=tenant, **more).communicate(timeout=120)
        code = self._started[-1].returncode
        assert code == 0, f"status {code}\n{out}\n{err}"
        return out

    def used(self, tenant: str = "tenant") -> int:
        return next(use.used_bytes for use in self.region.read_use() if use.name == tenant)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.region.close()


@pytest.fixture(scope="session")
def toolchains(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Toolchain]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    made: dict[str, Toolchain] = {}

    def get(kind: str = "plain") -> Toolchain:
        if kind not in made:
            made[kind] = Toolchain(tmp_path_factory.mktemp(f"native-{kind}"), kind)
        return made[kind]

    return get


@pytest.fixture
def rig(tmp_path: Path, toolchains: Callable[[str], Toolchain]) -> Iterator[Rig]:
    made = Rig(tmp_path, toolchains("plain"))
    yield made
    made.close()


@pytest.fixture
def make_rig(tmp_path: Path, toolchains: Callable[[str], Toolchain]) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []

    def make(kind: str) -> Rig:
        folder = tmp_path / f"{kind}{len(made)}"
        folder.mkdir()
        made.append(Rig(folder, toolchains(kind)))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
