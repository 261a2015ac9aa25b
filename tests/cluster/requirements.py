"""What a machine must have for a test cluster, and where each program comes from."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cluster.debian_packages import KEYRING, unpack
from tests.cluster.go_programs import build
from tests.cluster.kubernetes_versions import COMPONENTS, kubernetes

TOOLS = ("nsenter", "unshare", "setpriv", "ip", "mount", "sysctl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Folders to search for the programs of a cluster, first match wins."""

    folders: tuple[Path, ...]
    libraries: Path  # of the unpacked packages
    plugins: Path  # CNI

    def find(self, name: str) -> str:
        for folder in self.folders:
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
        raise FileNotFoundError(f"no program {name} in {', '.join(str(folder) for folder in self.folders)}")

    def environment(self) -> dict[str, str]:
        """So that containerd finds its shim and runc, and nft its library."""
        search = ":".join([*(str(folder) for folder in self.folders), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        return os.environ | {"PATH": search, "LD_LIBRARY_PATH": str(self.libraries)}


def missing() -> str | None:
    """Why no cluster can run here, or None."""
    reasons = []
    if os.geteuid() != 0:
        reasons.append("root (network namespaces, mounts and control groups)")
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if absent:
        reasons.append(f"the programs {', '.join(absent)} (Debian packages util-linux, iproute2, mount, procps)")
    if not _given("etcd") and shutil.which("apt-get") is None:
        reasons.append("apt-get (for etcd, containerd, runc and CNI plugins), or those programs in KUBEBUILDER_ASSETS")
    elif not _given("etcd") and not KEYRING.exists():
        reasons.append("the Debian package debian-archive-keyring")
    return "a test cluster needs " + "; ".join(reasons) if reasons else None


@cache
def programs() -> Programs:
    """Every program of a cluster: given ones first, the rest built or unpacked into the cache."""
    given = [Path(os.environ["KUBEBUILDER_ASSETS"])] if os.environ.get("KUBEBUILDER_ASSETS") else []
    if all(_given(component) for component in COMPONENTS):
        given += sorted({Path(str(shutil.which(component))).parent for component in COMPONENTS if shutil.which(component)})
    else:
        given.append(build(kubernetes()))
    packages = unpack()
    library = next(iter(sorted((packages / "usr" / "lib").glob("*-linux-gnu"))))
    folders = (*given, packages / "usr" / "sbin", packages / "usr" / "bin", packages / "bin")
    return Programs(folders=folders, libraries=library, plugins=packages / "usr" / "lib" / "cni")


def _given(name: str) -> bool:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    return bool(folder and os.access(Path(folder) / name, os.X_OK)) or shutil.which(name) is not None
