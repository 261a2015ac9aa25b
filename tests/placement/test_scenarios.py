"""Every scenario file holds: topology and Asks in, decision out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.placement.scenario import FOLDER, asks_of, limits_of, load, mix_of, snapshot_of

from aimgpu.domain import Decision, Placement
from aimgpu.errors import AimGpuError
from aimgpu.placement import MoveKind, ReasonCode, snapshot_from_json, snapshot_to_json
from aimgpu.placement.decide import decide, decide_all
from aimgpu.placement.preemption.planner import plan_all
from aimgpu.placement.scoring.mix import Mix
from aimgpu.units import parse_bytes, parse_ppm

FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_enough_of_them_and_each_says_its_rule() -> None:
    assert len(FILES) >= 60
    rules = [load(path)["rule"] for path in FILES]
    assert len(set(rules)) == len(rules)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    scenario = load(path)
    snapshot = snapshot_of(scenario)
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot
    if "error" in scenario["expect"]:
        with pytest.raises(AimGpuError) as caught:
            decide(snapshot, asks_of(scenario)[0])
        assert caught.value.code == scenario["expect"]["error"]
    elif "limits" in scenario:
        check_plan(scenario)
    else:
        check_decisions(scenario)


def check_decisions(scenario: Mapping[str, Any]) -> None:
    snapshot, asks = snapshot_of(scenario), asks_of(scenario)
    mix = mix_of(scenario)
    decisions = decide_all(snapshot, asks, mix=Mix() if mix is None else mix, reserved=scenario.get("reserved"))
    for decision, expected in zip(decisions, scenario["expect"], strict=True):
        check_decision(decision, expected)


def check_decision(decision: Decision, expected: Mapping[str, Any]) -> None:
    if "refused" not in expected:
        assert isinstance(decision, Placement), decision
        on = expected["at"] if isinstance(expected["at"], list) else [expected["at"]]
        assert [slot.partition_id for slot in decision.slots] == on
        if "memory" in expected:
            assert {slot.memory_bytes for slot in decision.slots} == {parse_bytes(expected["memory"])}
        if "compute" in expected:
            assert {slot.compute_ppm for slot in decision.slots} == {parse_ppm(expected["compute"])}
        assert {slot.exclusive for slot in decision.slots} == {expected.get("alone", False)}
        return
    assert not isinstance(decision, Placement), decision
    codes = expected["refused"]
    found = [reason.code for reason in decision.reasons]
    assert found == (codes if isinstance(codes, list) else [codes] * len(found))
    if "short" in expected:
        assert min(reason.short_bytes or 0 for reason in decision.reasons) == parse_bytes(expected["short"])
    for sentence in expected.get("would_fit", ()):
        assert sentence in decision.would_fit, decision.would_fit
    if "first" in expected:
        assert decision.would_fit[0] == expected["first"]
    for words in expected.get("never", ()):
        assert not any(words in sentence for sentence in decision.would_fit), decision.would_fit


def check_plan(scenario: Mapping[str, Any]) -> None:
    expected = scenario["expect"]
    batch = plan_all(snapshot_of(scenario), asks_of(scenario), limits_of(scenario))
    assert [refusal.ask for refusal in batch.refusals] == expected.get("refused", [])
    assert list(batch.plan.stopped) == expected.get("stopped", [])
    assert list(batch.plan.moved) == expected.get("moved", [])
    for name, sentences in expected.get("would_fit", {}).items():
        assert next(refusal.would_fit for refusal in batch.refusals if refusal.ask == name) == tuple(sentences)
    layouts = {
        step.device_id: step.after.device.layout.name
        for step in batch.plan.steps
        if step.kind is MoveKind.LAYOUT and step.after is not None
    }
    assert layouts == expected.get("layouts", {})
    placed = {placement.ask: [slot.partition_id for slot in placement.slots] for placement in batch.plan.placements}
    for name, on in expected.get("placed", {}).items():
        assert placed[name] == (on if isinstance(on, list) else [on])


def test_every_reason_code_has_a_scenario_that_gives_it() -> None:
    given = set[str]()
    for path in FILES:
        for expected in load(path)["expect"] if isinstance(load(path)["expect"], list) else ():
            codes = expected.get("refused", ())
            given |= {codes} if isinstance(codes, str) else set(codes)
    assert given == set(ReasonCode)
