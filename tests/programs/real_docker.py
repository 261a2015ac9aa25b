"""A private Docker daemon for tests, where this machine can run one."""

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

IMAGE = "aimgpu-test-empty:1"
_WAIT_SECONDS = 60.0


def why_not() -> str | None:
    """None: a daemon can be started here."""
    if os.geteuid() != 0:
        return "a private Docker daemon needs root"
    missing = [name for name in ("dockerd", "docker") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: apt-get install docker.io)" if missing else None


@contextmanager
def run_dockerd(folder: Path) -> Iterator[Path]:
    """Its socket. No bridge, no firewall rules, its own data: nothing of a Docker that already runs here is touched."""
    socket = folder / "docker.sock"
    where = ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    how = ["--storage-driver", "vfs", "--iptables=false", "--ip6tables=false", "--bridge=none", "-H", f"unix://{socket}"]
    with (folder / "log").open("wb") as log, subprocess.Popen(["dockerd", *where, *how], stdout=log, stderr=log) as daemon:
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


def import_empty_image(socket: Path) -> None:
    """An image with nothing in it: tests mount this machine's own programs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("tmp")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    command = ["docker", "-H", f"unix://{socket}", "import", "-", IMAGE]
    subprocess.run(command, input=buffer.getvalue(), check=True, capture_output=True)


def program_folders() -> tuple[str, ...]:
    """What a container must see to run this Python and the shell."""
    wanted = {"/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2])}
    return tuple(sorted(path for path in wanted if Path(path).exists()))
