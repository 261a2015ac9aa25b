"""The rows of the page: GPUs with their shares, models with their promises, and the samples of the charts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.world import Machine, boot, deployment, resident
from tests.web.test_journal import grant, instance
from tests.web.test_prompts import finished

from aimgpu.control.observation import MachineObserver, Observation, ObservedLedger
from aimgpu.domain import (
    Ask,
    Deployment,
    Exactness,
    Footprint,
    Fraction,
    InstanceState,
    Level,
    PartitionKind,
    Term,
    Want,
    Whole,
)
from aimgpu.hardware.simulated.hardware import SimulatedHardware
from aimgpu.kubernetes.models.page.measured import NodeMeasures, tenants_of
from aimgpu.qos.slo.activity import ActivityLog
from aimgpu.units import GIB, PPM
from aimgpu.web.gpu_rows import describe_gpus
from aimgpu.web.history import History
from aimgpu.web.model_rows import ModelRows, describe_want

READY = InstanceState.READY


def footprint(**terms: int) -> Footprint:
    return Footprint(
        model="m",
        engine="vllm",
        precision="fp16",
        context_tokens=8,
        concurrency=2,
        terms=tuple(
            Term(name=name, memory_bytes=size, exactness=Exactness.EXACT, formula="given") for name, size in terms.items()
        ),
    )


def observed(tmp_path: Path, *wanted: Deployment) -> Observation:
    controller = boot(Machine(root=tmp_path, gpus=1))
    try:
        controller.apply(list(wanted))
        ledger = ObservedLedger(instances=controller.instances, deployments=controller.deployments)
        return MachineObserver(controller._dependencies.hardware, ledger, patience_seconds=60.0).look()
    finally:
        controller.close()


def shares(seen: Observation, prints: dict[str, Footprint]) -> list[dict[str, Any]]:
    return [share for gpu in describe_gpus(seen, prints) for part in gpu["partitions"] for share in part["shares"]]


Size = st.integers(0, 1 << 41)


@given(weights=Size, kv_cache=Size, context=Size, activations=Size, size=st.integers(1, 1 << 41))
def test_the_terms_of_a_share_are_exactly_the_share(
    weights: int, kv_cache: int, context: int, activations: int, size: int
) -> None:
    """Whatever a model was sized to and whatever it was granted: a bar is neither longer nor shorter than its grant."""
    gpus = SimulatedHardware([("MI300X", 1)], Path("/nonexistent/gpus.json")).read_devices()
    held = replace(grant(size), device_id=gpus[0].id, partition_id=gpus[0].layout.partitions[0].id)
    seen = Observation(devices=gpus, instances=(instance(READY, held),))
    sized = footprint(weights=weights, kv_cache=kv_cache, context=context, activations=activations)
    (share,) = shares(seen, {"chat": sized})
    assert [term["name"] for term in share["terms"]] == ["weights", "kv_cache", "overhead", "reserve"]
    assert all(term["memory_bytes"] >= 0 for term in share["terms"])
    assert sum(term["memory_bytes"] for term in share["terms"]) == size


def test_a_share_without_a_footprint_or_asleep_has_no_terms(tmp_path: Path) -> None:
    seen = observed(tmp_path, deployment("chat", 40))
    (unknown,) = shares(seen, {})
    assert (unknown["terms"], unknown["memory_bytes"]) == ([], 40 * GIB)


def test_a_layout_that_the_list_lacks_is_shown_as_the_present_one(tmp_path: Path) -> None:
    seen = observed(tmp_path)
    (gpu,) = describe_gpus(seen, {})
    assert gpu["layout"] in [one["name"] for one in gpu["layouts"]]
    odd = replace(seen.devices[0], layouts=seen.devices[0].layouts[1:])
    (gpu,) = describe_gpus(replace(seen, devices=(odd,)), {})
    assert [one["name"] for one in gpu["layouts"]].count(odd.layout.name) == 1


@pytest.mark.parametrize(
    ("want", "text"),
    [
        (Fraction(ppm=PPM // 4), "fraction 25%"),
        (PartitionKind(kind="cpx"), "partition cpx"),
        (Whole(count=2), "whole 2"),
    ],
)
def test_a_wish_reads_as_the_stack_file_writes_it(want: Want, text: str) -> None:
    assert describe_want(want) == text


def rows(seen: Observation, **given_: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"scores": {}, "residents": (), "waiting": {}, "footprints": {}}
    return ModelRows(seen, **{**settings, **given_}).describe()


def wanted(name: str = "chat") -> Deployment:
    return Deployment(name=name, model="m", ask=Ask(name=name, want=Whole(count=1)))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([READY, InstanceState.FAILED, InstanceState.FAILED], ("ready", "2 of 3 copies failed")),
        ([READY, InstanceState.LOADING], ("ready", "chat-0 is loading")),
        ([InstanceState.LOADING, InstanceState.SLEEPING], ("loading", None)),
        ([InstanceState.FAILED, InstanceState.LOADING], ("failed", "why")),
        ([InstanceState.SLEEPING], ("sleeping", None)),
        ([InstanceState.QUEUED], ("queued", "has its place; the engine is about to start")),
    ],
)
def test_the_state_of_a_model_is_the_most_telling_of_its_copies(
    states: list[InstanceState], expected: tuple[str, str | None]
) -> None:
    copies = tuple(instance(state, reason="why" if state is InstanceState.FAILED else None) for state in states)
    (row,) = rows(Observation(deployments=(wanted(),), instances=copies))
    assert (row["state"], row["reason"]) == expected


def test_the_level_of_a_model_is_the_weakest_of_its_grants() -> None:
    held = (grant(GIB, Level.HARDWARE, "mig"), grant(GIB, Level.ADVISORY, "flag"))
    (row,) = rows(Observation(deployments=(wanted(),), instances=(instance(READY, *held),)))
    assert (row["level"], row["mechanism"], row["granted_bytes"]) == ("advisory", "mig, flag", 2 * GIB)
    assert row["measured_bytes"] is None, "unknown is not zero"


def test_time_until_unloading_runs_down_to_zero_and_not_at_all_under_a_request() -> None:
    seen = Observation(deployments=(wanted(),))
    for idle, left in ((10.0, 50.0), (60.0, 0.0), (1e9, 0.0)):
        (row,) = rows(seen, residents=[resident("chat", keep_seconds=60, idle_seconds=idle)])
        assert row["sleep_in_seconds"] == left
    for held in ({"in_flight": 1}, {"keep_seconds": None}):
        (row,) = rows(seen, residents=[resident("chat", **held)])
        assert row["sleep_in_seconds"] is None


def score(**fields: Any) -> dict[str, Any]:
    target = {"name": "ttft_p95", "budget_left": 0.5}
    usual = {"windows": [], "classes": {}, "targets": [target], "in_flight": 1, "slots": 4, "waiting": {"low": 2}, "recalls": 0}
    return {**usual, **fields}


def test_promises_of_a_class_stand_beside_those_of_the_others() -> None:
    own = {
        "low": {"own": True, "targets": [{"name": "latency_p99", "budget_left": -1.0}]},
        "high": {"own": False, "targets": []},
    }
    seen = Observation(deployments=(wanted(),))
    (row,) = rows(seen, scores={"models": {"chat": score(classes=own)}})
    assert [(one["name"], one["class"]) for one in row["targets"]] == [("ttft_p95", "others"), ("latency_p99", "low")]
    (row,) = rows(seen, scores={"models": {"chat": score()}})
    assert [one["class"] for one in row["targets"]] == ["all"]
    assert (row["traffic"]["requests_per_second"], row["traffic"]["requests"]) == (None, 0), "no window yet"
    (row,) = rows(seen)
    assert (row["traffic"], row["targets"]) == (None, [])


def entries(*seconds: float, status: int = 200) -> Any:
    log = ActivityLog(lambda: 0.0)
    for one in seconds:
        record = finished(None)
        record.seconds, record.status, record.streamed, record.first_byte_seconds = one, status, True, one / 2
        log.finished(record)
    return log.requests()


def test_a_sample_has_rates_tails_and_the_tightest_budget() -> None:
    history = History()
    scores = {"models": {"chat": score(classes={"low": {"own": True, "targets": [{"name": "x", "budget_left": -0.25}]}})}}
    sample = history.add(100.0, Observation(), scores, entries(*(0.1 * number for number in range(1, 21))), 5.0)
    model = sample["models"]["chat"]
    assert (model["rps"], model["tps"], model["failed"]) == (4.0, 20.0, 0)
    assert (model["latency"], model["ttft"]) == (pytest.approx(2.0), pytest.approx(1.0))
    assert sample["budget"] == {"chat": -0.25}
    assert history.last_number == 20
    empty = history.add(
        105.0, Observation(), {"models": {"chat": score(targets=[{"name": "x", "budget_left": None}])}}, (), 0.0
    )
    assert (empty["models"], empty["budget"], history.last_number) == ({}, {}, 20)


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=40))
def test_the_tail_is_one_of_the_values_and_no_more_than_a_twentieth_is_above_it(seconds: list[float]) -> None:
    tail = History().add(1.0, Observation(), {}, entries(*seconds), 1.0)["models"]["chat"]["latency"]
    assert tail in seconds
    assert sum(one > tail for one in seconds) <= len(seconds) * 0.05


def test_failures_are_counted_by_status() -> None:
    sample = History().add(1.0, Observation(), {}, entries(1.0, 1.0, status=503), 1.0)
    assert sample["models"]["chat"]["failed"] == 2


def test_waits_at_the_gate_are_shares_of_the_time_between_two_looks() -> None:
    def looked(waited: float, name: str = "chat-0") -> Observation:
        shares_ = [{"metadata": {"namespace": "t"}, "status": {"replicas": [{"pod": name, "claim": "c"}]}}]
        return Observation(tenants=tenants_of(NodeMeasures(claims={"t/c": (0.0, waited)}), shares_))

    history = History()
    gates = [
        history.add(float(at), look, {}, (), 5.0)["gate"]
        for at, look in enumerate(
            (looked(10.0), looked(12.5), looked(12.5), looked(1.0), looked(2.0), Observation(), looked(50.0))
        )
    ]
    assert gates == [{}, {"chat-0": 0.5}, {}, {}, {"chat-0": 0.2}, {}, {}], "one that began again does not count backwards"


def test_an_hour_is_kept_and_no_more() -> None:
    history = History()
    for at in range(800):
        history.add(float(at), Observation(), {}, (), 5.0)
    samples = history.samples()
    assert (len(samples), samples[0]["at"], samples[-1]["at"]) == (720, 80.0, 799.0)
