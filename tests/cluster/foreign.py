"""KServe and KAI-Scheduler, built from their Go modules: the real controllers that our annotations go through.

Both together cost about ten minutes of CPU to build, so a run builds them only where ``AIMGPU_TEST_KUBE_FOREIGN=1`` is set
(``make test-kube-foreign``). A run that finds them in the cache always uses them.
"""

import os

import pytest
from tests.cluster.go_programs import GoProgram, is_built

VARIABLE = "AIMGPU_TEST_KUBE_FOREIGN"
_KSERVE, _KAI = "github.com/kserve/kserve", "github.com/NVIDIA/KAI-scheduler"
KSERVE_MODULE, KAI_MODULE = (_KSERVE, "v0.20.0"), (_KAI, "v0.12.0")
KNATIVE_MODULE = ("knative.dev/serving", "v0.48.1")  # the version that KServe is built with
KSERVE = GoProgram(name="kserve", packages=(f"{_KSERVE}/cmd/manager", f"{_KSERVE}/cmd/llmisvc"))
KAI_PROGRAMS = ("admission", "binder", "podgroupcontroller", "podgrouper", "queuecontroller", "scheduler")
KAI = GoProgram(name="kai", packages=tuple(f"{_KAI}/cmd/{name}" for name in KAI_PROGRAMS))


def needs(*programs: GoProgram) -> pytest.MarkDecorator:
    """Skips a module, before its cluster starts, where these programs are neither built nor to be built."""
    absent = [program.name for program in programs if not is_built(program)]
    reason = f"{' and '.join(absent)} not in the cache, and minutes to build: make test-kube-foreign"
    return pytest.mark.skipif(bool(absent) and not os.environ.get(VARIABLE), reason=reason)
