"""KServe and KAI-Scheduler, built from their Go modules: the real controllers that our annotations go through.

Both together cost about ten minutes of CPU to build, so a run builds them only where ``AIMGPU_TEST_KUBE_FOREIGN=1`` is set
(``make test-kube-foreign``). Its modules run one by one, each on a cluster of its own.
"""

import os

import pytest
from tests.cluster.go_programs import GoProgram

VARIABLE = "AIMGPU_TEST_KUBE_FOREIGN"
_KSERVE, _KAI = "github.com/kserve/kserve", "github.com/NVIDIA/KAI-scheduler"
KSERVE_MODULE, KAI_MODULE = (_KSERVE, "v0.20.0"), (_KAI, "v0.12.0")
KNATIVE_MODULE = ("knative.dev/serving", "v0.48.1")  # the version that KServe is built with
KSERVE = GoProgram(name="kserve", packages=(f"{_KSERVE}/cmd/manager", f"{_KSERVE}/cmd/llmisvc"))
KAI_PROGRAMS = ("admission", "binder", "podgroupcontroller", "podgrouper", "queuecontroller", "scheduler")
KAI = GoProgram(name="kai", packages=tuple(f"{_KAI}/cmd/{name}" for name in KAI_PROGRAMS))


def needs(*programs: GoProgram) -> pytest.MarkDecorator:
    """Skips a module, before its cluster starts, where it was not asked for: each needs a cluster of its own."""
    names = " and ".join(program.name for program in programs)
    return pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{names}: run make test-kube-foreign")
