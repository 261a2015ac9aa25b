"""Which Kubernetes a test cluster runs: the version whose wrapper module is committed, or another one of the Go module proxy.

    AIMGPU_KUBERNETES_VERSION=v1.34.4 pytest tests/kubernetes/test_dra_sharing.py

Another version is downloaded and built once (10 CPU minutes). Features that it has as alpha are switched on, as the docs ask
for. A proxy may lack modules of a patch release, or their checksums: a build that fails names them, and another release may do.
"""

import os
import re
import shutil
from functools import cache
from pathlib import Path

from tests.cluster.cache import cached
from tests.cluster.go_programs import PROGRAMS, GoProgram
from tests.cluster.wrapper_module import write_wrapper

VARIABLE = "AIMGPU_KUBERNETES_VERSION"
COMMITTED = "v1.36.4"
MODULE = "k8s.io/kubernetes"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
BETA_FROM = 36  # minor version in which the gates below are on by default
ALPHA_GATES = ("DRAConsumableCapacity", "DRAPartitionableDevices", "DRADeviceTaints", "DRAExtendedResource")
_VERSION = re.compile(r"v1\.(\d+)\.(\d+)")


def chosen_version() -> str:
    """Of the environment variable, else the committed one."""
    version = os.environ.get(VARIABLE) or COMMITTED
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{VARIABLE} is {version!r}; write a release such as v1.34.4")
    return version


def chosen_minor() -> int:
    found = _VERSION.fullmatch(chosen_version())
    assert found is not None
    return int(found[1])


def counts_shares() -> bool:
    """Whether its scheduler counts shares against counters (kubernetes#139040): only then can claims change layouts."""
    found = _VERSION.fullmatch(chosen_version())
    assert found is not None
    return (int(found[1]), int(found[2])) >= (36, 2)


def default_gates() -> dict[str, bool]:
    """Feature gates that every component needs for the driver's features, where they are not on by default."""
    return {} if chosen_minor() >= BETA_FROM else dict.fromkeys(ALPHA_GATES, True)


def api_flags() -> dict[str, str]:
    """Scheduler and controllers of a version with alpha device taints wait for the API of taint rules."""
    return {} if chosen_minor() >= BETA_FROM else {"runtime-config": "resource.k8s.io/v1alpha3=true"}


@cache
def kubernetes() -> GoProgram:
    version = chosen_version()
    minor = str(chosen_minor())
    stamps = {"gitVersion": version, "gitMajor": "1", "gitMinor": minor, "gitCommit": "none", "gitTreeState": "archive"}
    return GoProgram(
        name="kubernetes",
        source=None if version == COMMITTED else cached(f"kubernetes-module-{version}", _write_module),
        links=COMPONENTS,
        ldflags="-s -w "
        + " ".join(
            f"-X {package}.{name}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for name, value in (stamps | {"buildDate": "2026-01-01T00:00:00Z"}).items()
        ),
    )


def _write_module(folder: Path) -> None:
    shutil.copyfile(PROGRAMS / "kubernetes" / "main.go", folder / "main.go")
    write_wrapper(MODULE, chosen_version(), folder)
