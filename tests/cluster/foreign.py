"""KServe with Knative, and KAI-Scheduler, built from their Go modules: the real controllers that our annotations go through.

All together cost about ten minutes of CPU to build, once: a run whose tests need them begins with that in the background,
with the lowest priority, and runs those tests last (`tests.tiers`). ``AIMGPU_TEST_KUBE_FOREIGN=0`` leaves them out.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.cluster.go_programs import GoProgram, build, is_built
from tests.cluster.kubernetes_versions import kubernetes
from tests.cluster.requirements import missing
from tests.downloads import DownloadFailed

VARIABLE = "AIMGPU_TEST_KUBE_FOREIGN"
MODULES = ("test_kserve_cluster.py", "test_kai_cluster.py")
_KSERVE, _KAI = "github.com/kserve/kserve", "github.com/NVIDIA/KAI-scheduler"
KSERVE_MODULE, KAI_MODULE = (_KSERVE, "v0.20.0"), (_KAI, "v0.12.0")
KNATIVE_MODULE = ("knative.dev/serving", "v0.48.1")  # the version that KServe is built with
KNATIVE_NETWORKING_MODULE = ("knative.dev/networking", "v0.0.0-20260120131110-a7cdca238a0d")
KNATIVE_CACHING_MODULE = ("knative.dev/caching", "v0.0.0-20260120130310-f1fc03b7f5ee")
# Knative in the same build: most of what it needs is compiled for KServe anyway.
KSERVE = GoProgram(
    name="kserve",
    packages=(
        *(f"{_KSERVE}/cmd/{name}" for name in ("manager", "llmisvc")),
        *(f"{KNATIVE_MODULE[0]}/cmd/{name}" for name in ("controller", "webhook", "queue")),
    ),
)
KAI_PROGRAMS = ("admission", "binder", "podgroupcontroller", "podgrouper", "queuecontroller", "scheduler")
KAI = GoProgram(name="kai", packages=tuple(f"{_KAI}/cmd/{name}" for name in KAI_PROGRAMS))


def needs(*programs: GoProgram) -> pytest.MarkDecorator:
    """Skips a module, before its cluster starts, where it is left out."""
    names = " and ".join(program.name for program in programs)
    return pytest.mark.skipif(os.environ.get(VARIABLE) == "0", reason=f"{names}: left out by {VARIABLE}=0")


def is_all_built() -> bool:
    """Whether every program of these tests is in the cache; where they cannot run there is nothing to build."""
    return missing() is not None or (is_built(KSERVE) and is_built(KAI))


def build_ahead(modules: Iterable[Path]) -> subprocess.Popen[bytes] | None:
    """Begin to build what tests of these modules will need; they wait for it where it is not done. Ends with its parent."""
    wanted = os.environ.get(VARIABLE) != "0" and any(path.name in MODULES for path in modules)
    if not wanted or is_all_built():
        return None
    command = ["setpriv", "--pdeathsig", "KILL", "--", "nice", "-n", "19", sys.executable, "-m", "tests.cluster.foreign"]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    with contextlib.suppress(DownloadFailed):  # the tests that need it say so
        for program in (kubernetes(), KSERVE, KAI):  # one after another: a build takes up to 2.4 GB
            build(program)
