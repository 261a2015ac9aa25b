"""A GPU has one name wherever people read it; text of the daemon names its ids."""

from io import StringIO

import pytest

from aimgpu.cli.progress import PlainProgress
from aimgpu.cli.views.apply import follow_apply
from aimgpu.cli.views.gpu_names import names_in_snapshot, names_in_status
from aimgpu.cli.views.partition import print_change
from aimgpu.cli.what_if import empty_machine

STATUS = {"gpus": [{"id": "sim-mi300x-1", "index": 0}, {"id": "sim-mi300x-10", "index": 1}]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2GiB of sim-mi300x-1/spx-0", "2GiB of gpu0/spx-0"),
        ("change sim-mi300x-10 from SPX", "change gpu1 from SPX"),
        ("sim-mi300x-2 is no GPU here", "sim-mi300x-2 is no GPU here"),
        ("no-sim-mi300x-1", "no-sim-mi300x-1"),
    ],
)
def test_ids_become_names_and_other_words_stay(text: str, shown: str) -> None:
    assert names_in_status(STATUS)(text) == shown


def test_a_single_node_is_not_named() -> None:
    world = empty_machine("MI300X", 2)
    rename = names_in_snapshot(world.snapshot)
    [node] = world.snapshot.nodes
    ids = [state.device.id for state in node.devices]
    assert rename(f"{node.name}/{ids[1]}: {ids[1]}/spx-0 is full") == "gpu1: gpu1/spx-0 is full"


def test_what_an_apply_says_of_a_failure_names_the_gpu_as_people_read_it() -> None:
    failed = {"event": "state", "deployment": "chat", "state": "failed", "reason": "sim-mi300x-10 was lost"}
    error = {
        "event": "error",
        "error": {"code": "conflict", "message": "sim-mi300x-1 is busy", "hint": "Wait for sim-mi300x-1."},
    }
    outcome = follow_apply([failed, error], PlainProgress(StringIO()), STATUS)
    assert outcome.failed["chat"]["reason"] == "gpu1 was lost"
    assert outcome.error is not None
    assert (outcome.error.message, outcome.error.hint) == ("gpu0 is busy", "Wait for gpu0.")


def test_a_change_of_layout_is_shown_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    here, other = "sim-mi300x-1", "sim-mi300x-10"
    change = {"device": here, "devices": [here, other], "before": "SPX/NPS1", "after": "CPX/NPS4", "simulated": True}
    change |= {"partitions_before": None, "partitions_after": None, "needs_reload": False, "stops": ["chat-0"], "returns": []}
    change |= {"does_not_fit": [{"instance": "chat-0", "why": f"{here}/cpx-0 is too small"}], "in_the_way": []}
    print_change(change, names_in_status(STATUS))
    out = capsys.readouterr().out
    assert "gpu0 (simulated): SPX/NPS1 -> CPX/NPS4" in out
    assert "these change too: gpu1." in out
    assert "Stays stopped: gpu0/cpx-0 is too small" in out
    assert "sim-mi300x" not in out
