"""What a supposition answers, on a snapshot, without a browser."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import Machine, boot, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.plan.prepared import Prepared
from aimgpu.domain import Deployment, Exactness, Footprint, Term
from aimgpu.errors import InvalidInput, UnknownDeployment, UnknownDevice
from aimgpu.placement import Snapshot
from aimgpu.units import GIB
from aimgpu.web.what_if import Supposition, suppose


class FakeSources:
    """The two things that a supposition reads."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def take_snapshot(self) -> Snapshot:
        return self.snapshot

    def size(self, wanted: Deployment) -> Prepared:
        term = Term(name="weights", memory_bytes=30 * GIB, exactness=Exactness.EXACT, formula="given")
        footprint = Footprint(
            model=wanted.model, engine="vllm", precision="fp16", context_tokens=1, concurrency=1, terms=(term,)
        )
        return Prepared(deployment=wanted, engine="vllm", footprint=footprint)


@pytest.fixture
def controller(tmp_path: Path) -> Any:
    controller = boot(Machine(root=tmp_path))
    controller.apply([deployment("chat", 40)])
    yield controller
    controller.close()


def answer(controller: Controller, snapshot: Snapshot | None = None, **body: Any) -> dict[str, Any]:
    found = FakeSources(snapshot or controller.snapshot())
    return suppose(found, Supposition.read(body))  # type: ignore[arg-type]


def shares(bars: list[dict[str, Any]]) -> dict[str, int]:
    return {one["model"]: one["memory_bytes"] for gpu in bars for part in gpu["partitions"] for one in part["shares"]}


def test_an_added_model_is_placed_and_what_runs_stays(controller: Controller) -> None:
    found = answer(controller, add=[{"name": "new", "fields": {"model": "a/model"}}])
    assert found["fits"]
    assert found["steps"] == []
    assert shares(found["before"]) == {"chat": 40 * GIB}
    assert shares(found["after"]) == {"chat": 40 * GIB, "new": 30 * GIB}


def test_a_removed_model_is_gone_and_a_layout_that_is_too_small_refuses_what_ran(controller: Controller) -> None:
    device = controller.devices()[0].id
    assert shares(answer(controller, remove=["chat"])["after"]) == {}
    found = answer(controller, layouts={gpu.id: "CPX/NPS1" for gpu in controller.devices()})
    assert not found["fits"], "40 GiB do not fit a partition of 24"
    assert f"set {device} to CPX/NPS1" in found["steps"]
    assert any("which the new layout stops" in step for step in found["steps"])


def test_others_processes_stay_where_a_layout_changes(controller: Controller) -> None:
    snapshot = controller.snapshot()
    (node,) = snapshot.nodes
    held = tuple(replace(state, foreign_bytes={"": 6 * GIB}) for state in node.devices)
    snapshot = replace(snapshot, nodes=(replace(node, devices=held),))
    device = controller.devices()[-1].id
    found = answer(controller, snapshot, layouts={device: "DPX/NPS1"})
    assert any("6GiB" in step and device in step for step in found["steps"])
    after = next(gpu for gpu in found["after"] if gpu["id"] == device)
    assert {part["foreign_bytes"] for part in after["partitions"]} == {6 * GIB}


@pytest.mark.parametrize("body", [{"add": "x"}, {"add": [1]}, {"remove": [1]}, {"layouts": []}, {"add": [{"name": 1}]}])
def test_nonsense_is_refused_in_words(controller: Controller, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        answer(controller, **body)


def test_unknown_names_are_refused_with_the_known_ones(controller: Controller) -> None:
    with pytest.raises(UnknownDeployment) as unknown:
        answer(controller, remove=["nobody"])
    assert "chat" in (unknown.value.hint or "")
    with pytest.raises(UnknownDevice):
        answer(controller, layouts={"gpu9": "SPX/NPS1"})
