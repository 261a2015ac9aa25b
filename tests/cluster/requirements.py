"""What a machine must have for a test cluster, and where each program comes from."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cluster.debian_packages import KEYRING, unpack
from tests.cluster.go_programs import GoProgram, build

KUBERNETES_VERSION = "v1.36.4"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
TOOLS = ("nsenter", "unshare", "setpriv", "ip", "mount", "sysctl")
STAMPS = {"gitVersion": KUBERNETES_VERSION, "gitMajor": "1", "gitMinor": "36", "gitCommit": "none", "gitTreeState": "archive"}
KUBERNETES = GoProgram(
    name="kubernetes",
    links=COMPONENTS,
    ldflags="-s -w "
    + " ".join(
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in (STAMPS | {"buildDate": "2026-01-01T00:00:00Z"}).items()
    ),
)


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
        given.append(build(KUBERNETES))
    packages = unpack()
    library = next(iter(sorted((packages / "usr" / "lib").glob("*-linux-gnu"))))
    folders = (*given, packages / "usr" / "sbin", packages / "usr" / "bin", packages / "bin")
    return Programs(folders=folders, libraries=library, plugins=packages / "usr" / "lib" / "cni")


def _given(name: str) -> bool:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    return bool(folder and os.access(Path(folder) / name, os.X_OK)) or shutil.which(name) is not None
