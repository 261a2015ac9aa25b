"""Programs from Debian packages, unpacked into the cache and not installed.

etcd and containerd are newer in sid (containerd has CDI from 2.0 on) and run on bookworm's C library; runc does not, so it
comes from bookworm. apt gets its own sources, lists and cache, so that the machine's own package state is not touched.
"""

import subprocess
from pathlib import Path

from tests.cluster.cache import cached
from tests.downloads import find_failure

PACKAGES = (
    "etcd-server/sid",
    "containerd/sid",
    "containernetworking-plugins/bookworm",
    "runc/bookworm",
    "busybox-static/bookworm",
    "nftables/bookworm",
    "libnftables1/bookworm",
    "libnftnl11/bookworm",
    "libseccomp2/bookworm",
)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR = "http://deb.debian.org/debian"


def unpack(key: str = "debian-1", packages: tuple[str, ...] = PACKAGES) -> Path:
    """The folder that the packages are unpacked in, as if it were ``/``."""
    return cached(key, lambda folder: _download(folder, packages))


def _download(folder: Path, packages: tuple[str, ...]) -> None:
    apt = folder / ".apt"
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True)
    suites = sorted({package.partition("/")[2] for package in packages})
    lines = [f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n" for suite in suites]
    (apt / "sources.list").write_text("".join(lines))
    options = {
        "Dir::Etc::sourcelist": str(apt / "sources.list"),
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": str(apt / "lists"),
        "Dir::Cache": str(apt / "cache"),
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "--quiet=2"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    _run([*command, "update"], apt)
    _run([*command, "download", *packages], apt / "packages")
    for package in sorted((apt / "packages").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(folder)], apt)
    _run(["rm", "-rf", str(apt)], folder)


def _run(command: list[str], folder: Path) -> None:
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise find_failure(answer.stderr) or RuntimeError(f"{command[0]} failed: {answer.stderr.strip()[-2000:]}")
