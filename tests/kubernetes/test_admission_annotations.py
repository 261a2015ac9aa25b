"""Annotations of a pod: what is accepted, what it means, and what is refused with which reason."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import IsolationRequirement, Priority
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.admission.annotations import parse_annotations

AIM = "aim.amd.com"
POD: dict[str, Any] = {"containers": [{"name": "main"}, {"name": "side"}], "initContainers": [{"name": "load"}]}


ACCEPTED = [
    ({"gpu-fraction": "0.5"}, {"fraction_ppm": 500_000, "container": "main", "devices": 1}),
    ({"gpu-fraction": ".25"}, {"fraction_ppm": 250_000}),
    ({"gpu-fraction": "0.999999"}, {"fraction_ppm": 999_999}),
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
]


@pytest.mark.parametrize(("annotations", "reason"), REFUSED, ids=str)
def test_refused_with_the_reason_and_what_to_write(annotations: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_annotations(annotations, POD)
    assert reason in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu", "aim.amd.com/gpu", "nvidia.com/mig-1g.10gb"])
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize("field", ["limits", "requests"])
def test_a_share_beside_a_whole_gpu_is_refused(resource: str, kind: str, field: str) -> None:
    spec = {"containers": [{"name": "main"}], kind: [{"name": "main", "resources": {field: {resource: "1"}}}]}
    with pytest.raises(InvalidInput, match=resource):
        parse_annotations({"gpu-fraction": "0.5"}, spec)


@pytest.mark.parametrize("annotations", [{}, {"other": "1"}, {f"{AIM}/qos-priority": "high"}, {f"{AIM}/gpu-sharing": "false"}])
def test_pods_that_ask_for_nothing_are_not_ours(annotations: dict[str, str]) -> None:
    assert parse_annotations(annotations, POD) is None


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
