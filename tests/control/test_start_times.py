"""The estimate that a start shows: what the last start of the same model took."""

import json
from dataclasses import replace
from pathlib import Path

from tests.control.world import Machine, boot, deployment

from aimgpu.control.instance.start_times import expected_seconds, note_start
from aimgpu.domain import Instance, InstanceState

CHAT = Instance(
    id="chat-0", deployment="chat", replica=0, model="m", engine="vllm", launcher="process", state=InstanceState.READY
)


def test_the_last_start_of_a_model_is_remembered_across_daemons(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert expected_seconds(runs, CHAT) is None
    note_start(runs, replace(CHAT, load_ms=75_300))
    note_start(runs, replace(CHAT, model="other", load_ms=900))
    assert expected_seconds(runs, replace(CHAT, id="chat-1", deployment="renamed")) == 75
    assert expected_seconds(runs, replace(CHAT, engine="llamacpp")) is None
    assert expected_seconds(runs, replace(CHAT, model="other")) is None, "so short a start needs no estimate"


def test_a_damaged_file_costs_the_estimate_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "start-times.json").write_text('{"vllm process m": "soon", "x": [1]}')
    assert expected_seconds(tmp_path / "runs", CHAT) is None
    note_start(tmp_path / "runs", replace(CHAT, load_ms=9_000))
    assert expected_seconds(tmp_path / "runs", CHAT) == 9


def test_a_start_is_timed_and_the_next_one_says_how_long_it_takes(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    controller.apply([deployment("chat")])
    (first,) = controller.instances()
    file = machine.root / "start-times.json"
    (key,) = (known := json.loads(file.read_text()))
    assert known == {key: first.load_ms}
    controller.release(["chat"])
    file.write_text(json.dumps({key: 75_000}))
    texts: list[str] = []
    controller.apply([deployment("chat")], emit=lambda event: texts.append(event.text))
    assert any("starts in about 75 s" in text for text in texts)
    controller.close()
