"""AMD's unmodified tools, from the packages of Debian and Ubuntu, run on an emulated machine.

A tool set is unpacked with all that it needs into a folder of the user's cache (they want a newer C library than many hosts
have), and run there as root directory in a mount namespace of its own, with the emulated tree as /sys.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.downloads import DownloadFailed, find_failure, one_line

from aimgpu.hardware.amd.command import CommandResult, run_command

_DEBIAN = "http://deb.debian.org/debian"
_UBUNTU = "http://archive.ubuntu.com/ubuntu"
_DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_APT_SECONDS = 300
_SYS_ADMIN = 21  # number of the capability CAP_SYS_ADMIN
_NEEDED = ("apt-get", "dpkg-deb", "unshare", "nsenter", "mount", "chroot")

_APT_CONF = """
Dir "{place}";
Dir::State "{place}/state";
Dir::State::status "{place}/state/status";
Dir::Cache "{place}/cache";
Dir::Etc "{place}/etc";
Dir::Etc::sourcelist "{place}/etc/sources.list";
Dir::Etc::sourceparts "-";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
Acquire::Retries "3";
APT::Architecture "amd64";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
"""

# Holds /dev/kfd open, as a compute process does, and the namespace alive, until its input ends.
_KEEPER = "import sys; held = open('/dev/kfd'); print('up', flush=True); sys.stdin.read()"
_ENTER = """
set -e
mount --make-rprivate /
mount --bind "$1" "$2/sys"
mount --bind /proc "$2/proc"
mount --bind /dev/null "$2/dev/null"
mount -t tmpfs none "$2/dev/shm"
root="$2"; code="$3"
exec chroot "$root" /usr/bin/python3 -c "$code"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSet:
    name: str
    sources: tuple[str, ...]
    packages: tuple[str, ...]
    extras: tuple[str, ...] = ("dash", "procps")  # that the tools call without saying so
    keyring_package: str | None = None  # from Debian, where the archive is not Debian's
    release: str | None = None


TOOL_SETS = (
    ToolSet(
        name="debian-sid",
        sources=(f"deb [signed-by={_DEBIAN_KEYS}] {_DEBIAN} sid main",),
        packages=("amd-smi", "rocm-smi"),
    ),
    ToolSet(
        name="ubuntu-resolute",
        sources=(f"deb [signed-by={{keys}}/ubuntu-archive-keyring.gpg] {_UBUNTU} resolute main universe",),
        packages=("amd-smi", "rocm-smi"),
        keyring_package="ubuntu-keyring",
    ),
    ToolSet(
        name="debian-experimental",
        sources=(
            f"deb [signed-by={_DEBIAN_KEYS}] {_DEBIAN} sid main",
            f"deb [signed-by={_DEBIAN_KEYS}] {_DEBIAN} experimental main",
        ),
        packages=("rocm-smi",),
        release="experimental",
    ),
)


def why_not() -> str | None:
    """Why the tools cannot be run here, or None."""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if os.geteuid() != 0 or not effective >> _SYS_ADMIN & 1:
        return "mounting an emulated /sys needs root"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    missing = [program for program in _NEEDED if shutil.which(program) is None]
    if missing:
        return f"missing programs: {', '.join(missing)}"
    return None if Path(_DEBIAN_KEYS).exists() else "no Debian archive keys"


def unpack(tools: ToolSet) -> Path:
    """The root directory of a tool set: from the cache, else from the archive. Raises DownloadFailed where that fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aimgpu" / "amd-tools" / tools.name
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = sorted(cache.glob("*/.complete"))
        return ready[-1].parent if ready else _download(tools, cache)


def _download(tools: ToolSet, cache: Path) -> Path:
    keys = None
    if tools.keyring_package:
        debian = ToolSet(name="keys", sources=TOOL_SETS[0].sources, packages=(tools.keyring_package,), extras=())
        keys = _fetch(debian, cache / "apt-keys", cache / "keys", None) / "usr/share/keyrings"
    root = _fetch(tools, cache / "apt", cache / "unpacking", keys)
    (root / ".complete").touch()
    return root


def _fetch(tools: ToolSet, place: Path, root: Path, keys: Path | None) -> Path:
    """Resolve the packages on an empty system, download them, unpack them into a folder named by their versions."""
    for folder in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    (place / "state/status").touch()
    (place / "apt.conf").write_text(_APT_CONF.format(place=place))
    (place / "etc/sources.list").write_text("".join(line.format(keys=keys) + "\n" for line in tools.sources))
    environment = {**os.environ, "APT_CONFIG": str(place / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}
    release = ["-t", tools.release] if tools.release else []
    wanted = [*release, "install", *tools.packages, *tools.extras]
    for argv in (["apt-get", "-q", "update"], ["apt-get", "-q", "-y", "--download-only", *wanted]):
        done = subprocess.run(argv, env=environment, check=False, capture_output=True, text=True, timeout=_APT_SECONDS)
        if done.returncode:
            raise find_failure(done.stderr) or DownloadFailed(", ".join(tools.packages), one_line(done.stderr))
    shutil.rmtree(root, ignore_errors=True)
    _make_root(root)
    archives = sorted((place / "cache/archives").glob("*.deb"))
    for archive in archives:
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True, capture_output=True)
    versions = [archive.name.rpartition("_")[0] for archive in archives if archive.name.partition("_")[0] in tools.packages]
    shutil.rmtree(place)
    return root.rename(root.with_name("+".join(versions)))


def _make_root(root: Path) -> None:
    for folder in ("usr/lib", "usr/lib64", "usr/bin", "usr/sbin", "sys", "proc", "dev/shm", "tmp", "etc"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("lib", "lib64", "bin", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev/kfd", "dev/null"):  # /dev/dri stays absent: the tools crash on files that are no GPUs
        (root / name).touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRoom:
    """A namespace in which the tools see the emulated machine. `keeper` is a live process there that has /dev/kfd open."""

    keeper: int
    root: Path

    def run(self, argv: Sequence[str], *, timeout_seconds: float = 120, answer: str = "") -> CommandResult:
        """A CommandRunner: `argv[0]` is a tool's name or path."""
        inside = ["nsenter", "-t", str(self.keeper), "-m", "-r", "-w", "/usr/bin/python3", f"/usr/bin/{Path(argv[0]).name}"]
        return run_command([*inside, *argv[1:]], timeout_seconds=timeout_seconds, answer=answer)


@contextmanager
def tool_room(root: Path, tree: Path) -> Iterator[ToolRoom]:
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", _ENTER, "sh", str(tree), str(root), _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"up\n":
            raise RuntimeError("the room of AMD's tools could not be set up")
        yield ToolRoom(keeper=process.pid, root=root)
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()
