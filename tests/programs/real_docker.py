"""A private Docker daemon for tests, where this machine can run one."""

import ctypes
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

IMAGE = "aimgpu-test-empty:1"
_WAIT_SECONDS = 60.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, linux/sched.h


def why_not() -> str | None:
    """None: a daemon can be started here."""
    if os.geteuid() != 0:
        return "a private Docker daemon needs root"
    missing = [name for name in ("dockerd", "docker", "ip") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: apt-get install docker.io)" if missing else None


@contextmanager
def run_dockerd(folder: Path) -> Iterator[Path]:
    """Its socket. A network namespace with a bridge of its own, no firewall rules, its own data: nothing of a Docker that
    already runs here is touched. `network_of` enters that namespace.
    """
    socket = folder / "docker.sock"
    where = ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    how = ["--storage-driver", "vfs", "--iptables=false", "--ip6tables=false", "-H", f"unix://{socket}"]
    with (folder / "log").open("wb") as log, _start_apart(["dockerd", *where, *how], log) as daemon:
        try:
            deadline = time.monotonic() + _WAIT_SECONDS
            while subprocess.run(["docker", "-H", f"unix://{socket}", "version"], capture_output=True, check=False).returncode:
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "log").read_text()[-500:])
                time.sleep(0.2)
            import_empty_image(socket)
            yield socket
        finally:
            daemon.terminate()
            daemon.wait()
            subprocess.run(["umount", str(folder / "exec/netns/default")], capture_output=True, check=False)


@contextmanager
def network_of(socket: Path) -> Iterator[None]:
    """This thread, and what it starts, is where this Docker publishes ports."""
    pid = (socket.parent / "pid").read_text()
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    with _own_network_back():
        _LIBC.setns(theirs, _NEW_NETWORK)
        os.close(theirs)
        yield


@contextmanager
def _own_network_back() -> Iterator[None]:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _LIBC.setns(before, _NEW_NETWORK)
        os.close(before)


def _start_apart(words: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    with _own_network_back():
        if _LIBC.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "no network namespace")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return subprocess.Popen(words, stdout=log, stderr=log)


def import_empty_image(socket: Path) -> None:
    """An image with nothing in it: tests mount this machine's own programs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
    command = ["docker", "-H", f"unix://{socket}", "import", "-", IMAGE]
    subprocess.run(command, input=buffer.getvalue(), check=True, capture_output=True)


def program_folders() -> tuple[str, ...]:
    """What a container must see to run this Python and the shell."""
    wanted = {"/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2])}
    return tuple(sorted(path for path in wanted if Path(path).exists()))
