"""Annotations of a pod: what is accepted, what it means, and what is refused with which reason."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import IsolationRequirement, Priority
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.vocabulary.annotations import parse_annotations

AIM = "aim.amd.com"
POD: dict[str, Any] = {"containers": [{"name": "main"}, {"name": "side"}], "initContainers": [{"name": "load"}]}


ACCEPTED = [
    ({"gpu-fraction": "0.5"}, {"fraction_ppm": 500_000, "container": "main", "devices": 1}),
    ({"gpu-fraction": ".25"}, {"fraction_ppm": 250_000}),
    ({"gpu-fraction": "0.999999"}, {"fraction_ppm": 999_999}),
    ({"gpu-fraction": "5e-1"}, {"fraction_ppm": 500_000}),  # as KAI-Scheduler reads them
    ({"gpu-fraction": "+0.5"}, {"fraction_ppm": 500_000}),
    ({"gpu-fraction": "25E-2"}, {"fraction_ppm": 250_000}),
    ({"gpu-memory": "18446744073709551615"}, {"memory_mib": (2**63 - 1) >> 20}),  # no GPU has it: the pod waits
    ({"gpu-memory": "4096"}, {"memory_mib": 4096}),
    ({"gpu-memory": "1", "gpu-fraction-num-devices": "2"}, {"memory_mib": 1, "devices": 2}),
    ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "4"}, {"devices": 4}),
    ({"gpu-fraction": "0.5", "gpu-fraction-container-name": "side"}, {"container": "side"}),
    ({"gpu-fraction": "0.5", "gpu-fraction-container-name": "load"}, {"container": "load"}),
    ({f"{AIM}/gpu-sharing": "true"}, {"sized_by_model": True, "container": "main"}),
    ({f"{AIM}/gpu-sharing": "true", "gpu-memory": "2048"}, {"memory_mib": 2048, "sized_by_model": False}),
    ({f"{AIM}/compute-mode": "CPX"}, {"compute_mode": "CPX", "wants_partition": True}),
    ({f"{AIM}/compute-mode": "cpx", f"{AIM}/memory-mode": "nps4"}, {"compute_mode": "CPX", "memory_mode": "NPS4"}),
    ({f"{AIM}/compute-mode": "DPX", f"{AIM}/memory-mode": "NPS2"}, {"memory_mode": "NPS2"}),
    ({"gpu-fraction": "0.5", f"{AIM}/isolation": "enforced"}, {"isolation": IsolationRequirement.ENFORCED}),
    ({"gpu-fraction": "0.5", f"{AIM}/qos-priority": "high"}, {"priority": Priority.HIGH}),
    ({"gpu-fraction": "0.5", f"{AIM}/compute": "30%"}, {"compute_percent": 30}),
    (
        {"gpu-fraction": "0.5", f"{AIM}/slo-ttft-p95": "500ms", f"{AIM}/slo-availability": "99.5%"},
        {"objectives": {"ttft-p95": "500ms", "availability": "99.5%"}},
    ),
]


@pytest.mark.parametrize(("annotations", "expected"), ACCEPTED, ids=",".join)
def test_accepted(annotations: dict[str, str], expected: dict[str, object]) -> None:
    found = parse_annotations(annotations, POD)
    assert found is not None
    assert {name: getattr(found, name) for name in expected} == expected


REFUSED = [
    ({"gpu-fraction": "0"}, "gpu-fraction cannot be '0'"),
    ({"gpu-fraction": "0.0"}, "gpu-fraction cannot be '0.0'"),
    ({"gpu-fraction": "1"}, "gpu-fraction cannot be '1'"),
    ({"gpu-fraction": "1.0"}, "gpu-fraction cannot be '1.0'"),
    ({"gpu-fraction": "1.5"}, "gpu-fraction cannot be '1.5'"),
    ({"gpu-fraction": "-0.5"}, "gpu-fraction cannot be '-0.5'"),
    ({"gpu-fraction": "50%"}, "gpu-fraction cannot be '50%'"),
    ({"gpu-fraction": "nan"}, "gpu-fraction cannot be 'nan'"),
    ({"gpu-fraction": ""}, "gpu-fraction cannot be ''"),
    ({"gpu-fraction": "0.0000001"}, "gpu-fraction cannot be"),
    ({"gpu-fraction": "5e1"}, "gpu-fraction cannot be '5e1'"),
    ({"gpu-fraction": "0x1p-1"}, "gpu-fraction cannot be '0x1p-1'"),
    ({"gpu-fraction": "500m"}, "gpu-fraction cannot be '500m'"),
    ({"gpu-memory": "18446744073709551616"}, "gpu-memory cannot be '18446744073709551616'"),
    ({"gpu-memory": "0"}, "gpu-memory cannot be '0'"),
    ({"gpu-memory": "-1"}, "gpu-memory cannot be '-1'"),
    ({"gpu-memory": "1.5"}, "gpu-memory cannot be '1.5'"),
    ({"gpu-memory": "4Gi"}, "gpu-memory cannot be '4Gi'"),
    ({"gpu-fraction": "0.5", "gpu-memory": "1024"}, "gpu-fraction and gpu-memory are both given"),
    ({"gpu-fraction-num-devices": "2"}, "gpu-fraction-num-devices needs gpu-fraction or gpu-memory"),
    ({f"{AIM}/gpu-sharing": "true", "gpu-fraction-num-devices": "2"}, "needs gpu-fraction or gpu-memory"),
    ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "0"}, "gpu-fraction-num-devices cannot be '0'"),
    ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "65"}, "gpu-fraction-num-devices cannot be '65'"),
    ({"gpu-fraction": "0.5", "gpu-fraction-container-name": "other"}, "gpu-fraction-container-name cannot be 'other'"),
    ({"gpu-fraction-container-name": "main"}, "needs gpu-fraction or gpu-memory"),
    ({f"{AIM}/gpu-sharing": "yes"}, "gpu-sharing cannot be 'yes'"),
    ({f"{AIM}/compute-mode": "FPX"}, "compute-mode cannot be 'FPX'"),
    ({f"{AIM}/memory-mode": "NPS3"}, "memory-mode cannot be 'NPS3'"),
    ({f"{AIM}/compute-mode": "SPX", f"{AIM}/memory-mode": "NPS4"}, "no GPU can be in SPX with NPS4"),
    ({"gpu-fraction": "0.5", f"{AIM}/isolation": "strong"}, "isolation cannot be 'strong'"),
    ({"gpu-fraction": "0.5", f"{AIM}/qos-priority": "urgent"}, "qos-priority cannot be 'urgent'"),
    ({"gpu-fraction": "0.5", f"{AIM}/compute": "0%"}, "compute cannot be '0%'"),
    ({"gpu-fraction": "0.5", f"{AIM}/compute": "101%"}, "compute cannot be '101%'"),
    ({"gpu-fraction": "0.5", f"{AIM}/compute": "12.5%"}, "compute cannot be '12.5%'"),
    ({"gpu-fraction": "0.5", f"{AIM}/slo-ttft-p95": "fast"}, "slo-ttft-p95 cannot be 'fast'"),
    ({"gpu-fraction": "0.5", f"{AIM}/slo-ttft-p42": "1s"}, "slo-ttft-p42 is not a promise"),
    ({f"{AIM}/gpu-sharng": "true"}, "the annotation aim.amd.com/gpu-sharng is not known"),
    ({"gpu-sharng": "true"}, "the annotation gpu-sharng is not known"),
    ({"gpu-fracton": "0.5"}, "the annotation gpu-fracton is not known"),
    ({"gpu-fraction": "0.5", f"{AIM}/isolaton": "enforced"}, "the annotation aim.amd.com/isolaton is not known"),
    ({f"{AIM}/isolation": "enforced"}, "isolation has no effect without a share"),
    ({f"{AIM}/qos-priority": "high"}, "qos-priority has no effect without a share"),
    ({f"{AIM}/compute": "30%"}, "compute has no effect without a share"),
    ({f"{AIM}/slo-ttft-p95": "500ms"}, "slo-ttft-p95 has no effect without a share"),
    ({f"{AIM}/concurrency": "8"}, "concurrency has no effect without a share"),
    ({"gpu-memory": "1024", f"{AIM}/concurrency": "many"}, "concurrency cannot be 'many'"),
    ({"gpu-memory": "1024", f"{AIM}/concurrency": "0"}, "concurrency cannot be '0'"),
    ({"gpu-memory": "1024", f"{AIM}/compute": "-5%"}, "compute cannot be '-5%'"),
    ({"gpu-fraction": "0.5", "mps": "true"}, "mps cannot be 'true'"),
]


@pytest.mark.parametrize(("annotations", "reason"), REFUSED, ids=str)
def test_refused_with_the_reason_and_what_to_write(annotations: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_annotations(annotations, POD)
    assert reason in refused.value.message
    assert refused.value.hint


GPU_LIMITS = [
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/mig-1g.10gb",
    "amd.com/gpu",
    "amd.com/gpu.shared",
    "amd.com/cpx_nps4",
    "aim.amd.com/gpu",
    "aim.amd.com/gpu-shared",
    "aim.amd.com/gpu-partition",
    "deviceclass.resource.kubernetes.io/gpu.aim.amd.com",
    "deviceclass.resource.kubernetes.io/shared.gpu.aim.amd.com",
]


@pytest.mark.parametrize("resource", GPU_LIMITS)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize("field", ["limits", "requests"])
def test_a_share_beside_a_whole_gpu_is_refused(resource: str, kind: str, field: str) -> None:
    spec = {"containers": [{"name": "main"}], kind: [{"name": "main", "resources": {field: {resource: "1"}}}]}
    with pytest.raises(InvalidInput, match=resource):
        parse_annotations({"gpu-fraction": "0.5"}, spec)


OFF = f"{AIM}/gpu-sharing"
NOT_OURS = [
    {},
    {"other": "1"},
    {"gpu-vendor": "x"},
    {OFF: "false"},
    {OFF: "false", f"{AIM}/isolation": "none"},
    {"mps": "true"},
]


@pytest.mark.parametrize("annotations", NOT_OURS, ids=str)
def test_pods_that_ask_for_nothing_are_not_ours(annotations: dict[str, str]) -> None:
    assert parse_annotations(annotations, POD) is None


def test_what_the_gateway_reads_of_a_model_with_whole_gpus_may_stand_on_its_pods() -> None:
    """KServe copies the annotations of an InferenceService to them."""
    served = {f"{AIM}/engine": "vllm", f"{AIM}/qos-priority": "high", f"{AIM}/concurrency": "8", f"{AIM}/slo": "{}"}
    assert parse_annotations(served, POD) is None
    limited = {"containers": [{"name": "main", "resources": {"limits": {"aim.amd.com/gpu": "1"}}}]}
    assert parse_annotations({f"{AIM}/qos-priority": "high"}, limited) is None
    with pytest.raises(InvalidInput, match="isolation has no effect"):
        parse_annotations({f"{AIM}/isolation": "enforced"}, limited)


def test_kai_scheduler_reads_its_own_annotation_for_mps() -> None:
    assert parse_annotations({"gpu-fraction": "0.5", "mps": "true"}, {**POD, "schedulerName": "kai-scheduler"}) is not None


@given(st.dictionaries(st.sampled_from([key for pair in (*ACCEPTED, *REFUSED) for key in pair[0]]), st.text(max_size=12)))
def test_any_annotations_are_read_or_refused_and_nothing_else(annotations: dict[str, str]) -> None:
    with contextlib.suppress(InvalidInput):
        found = parse_annotations(annotations, POD)
        assert found is None or found.container in ("main", "side", "load")


@given(st.integers(1, 999_999))
def test_fractions_are_exact_to_a_millionth(ppm: int) -> None:
    found = parse_annotations({"gpu-fraction": f"0.{ppm:06d}"}, POD)
    assert found is not None
    assert found.fraction_ppm == ppm
