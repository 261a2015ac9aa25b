"""What happened, in sentences: found by comparing looks, never invented, and bounded."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.control.observation import Observation
from aimgpu.domain import Grant, Instance, InstanceState, Level, Priority
from aimgpu.hardware.simulated.hardware import SimulatedHardware
from aimgpu.units import GIB
from aimgpu.web.journal import EventJournal

STATES = tuple(InstanceState)


def grant(size: int, level: Level = Level.RUNTIME, mechanism: str = "interposer") -> Grant:
    return Grant(
        id="g",
        instance_id="chat-0",
        deployment="chat",
        node="here",
        device_id="gpu",
        partition_id="gpu/p",
        memory_bytes=size,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=level,
        mechanisms=(mechanism,),
    )


def instance(state: InstanceState, *grants: Grant, name: str = "chat", reason: str | None = None) -> Instance:
    return Instance(
        id=f"{name}-0",
        deployment=name,
        replica=0,
        model="m",
        engine="vllm",
        launcher="process",
        state=state,
        reason=reason,
        grants=grants,
    )


def seen(*instances: Instance, **fields: Any) -> Observation:
    return Observation(instances=instances, **fields)


def texts(*looks: Observation) -> list[str]:
    journal = EventJournal(lambda: 5.0)
    for look in looks:
        journal.compare(look, {}, {})
    return [one.text for one in journal.entries()]


READY, LOADING = InstanceState.READY, InstanceState.LOADING


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (seen(), seen(instance(LOADING)), "loading"),
        (seen(instance(LOADING)), seen(instance(READY, grant(2 * GIB))), "ready on gpu/p with 2GiB, enforcement runtime"),
        (seen(instance(LOADING)), seen(instance(InstanceState.FAILED, reason="out of memory")), "failed: out of memory"),
        (seen(instance(READY, grant(3 * GIB))), seen(instance(READY, grant(GIB))), "resized from 3GiB to 1GiB"),
        (seen(instance(READY)), seen(instance(READY, grant(GIB))), "was granted 1GiB"),
        (seen(instance(READY, grant(GIB))), seen(instance(READY)), "gave 1GiB back"),
        (
            seen(instance(READY, grant(3 * GIB))),
            seen(instance(InstanceState.SLEEPING, grant(GIB))),
            "asleep; 2GiB given back",
        ),
        (seen(instance(READY, grant(GIB))), seen(), "stopped; 1GiB given back"),
        (seen(instance(InstanceState.QUEUED)), seen(), "stopped"),
        (
            seen(instance(READY, grant(GIB))),
            seen(instance(READY, grant(GIB, Level.ADVISORY, "flag"))),
            "is enforced at advisory instead of runtime",
        ),
        (seen(), seen(device_error="amd-smi hangs"), "GPUs cannot be read: amd-smi hangs"),
        (seen(device_error="amd-smi hangs"), seen(), "GPUs can be read again"),
        (seen(), seen(lost={"gpu-0": "it is lost"}), "GPUs cannot be read: gpu-0: it is lost"),
    ],
)
def test_each_change_is_one_sentence(before: Observation, after: Observation, expected: str) -> None:
    assert texts(before, after) == [expected]
    assert texts(before, after, after) == [expected], "and no news the second time"


def test_a_grant_never_looks_smaller_than_the_need_that_it_was_made_for() -> None:
    need = 5 * GIB + 1
    assert texts(seen(), seen(instance(READY, grant(need)))) == ["ready on gpu/p with 5.1GiB, enforcement runtime"]


def test_the_first_look_is_no_news_and_another_copy_hides_one_that_held_nothing() -> None:
    assert texts(seen(instance(READY, grant(GIB)))) == []
    waiting = replace(instance(InstanceState.QUEUED), id="chat-1")
    assert texts(seen(instance(READY), waiting), seen(instance(READY))) == []


def test_a_layout_that_changed_names_both(tmp_path: Any) -> None:
    hardware = SimulatedHardware([("MI300X", 1)], tmp_path / "gpus.json")
    before = seen(devices=hardware.read_devices())
    hardware.apply_layout(before.devices[0].id, "CPX/NPS1")
    (text,) = texts(before, seen(devices=hardware.read_devices()))
    assert text == f"{before.devices[0].id} changed from SPX/NPS1 to CPX/NPS1"


def test_waits_and_pressure_are_noted_when_they_begin_change_and_end() -> None:
    journal = EventJournal(lambda: 5.0)
    for waiting, pressure in (
        ({}, {}),
        ({"large": "no room"}, {"gpu": {"reason": "chat is over its budget"}}),
        ({"large": "no room"}, {"gpu": {"reason": "chat is over its budget"}}),
        ({"large": "half the room"}, {"gpu": {}}),
        ({}, {}),
    ):
        journal.compare(seen(), waiting, pressure)
    assert [(one.model, one.kind, one.text) for one in journal.entries()] == [
        ("large", "refused", "waits: no room"),
        (None, "pressure", "gpu: chat is over its budget"),
        ("large", "refused", "waits: half the room"),
        (None, "pressure", "gpu: "),
        (None, "pressure", "gpu: low-priority work runs freely again"),
    ]


Looks = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.sampled_from(STATES), st.integers(0, 3)), max_size=3), max_size=12
)


@given(looks=Looks)
def test_numbers_rise_by_one_and_nothing_is_noted_where_nothing_changed(
    looks: list[dict[str, tuple[InstanceState, int]]],
) -> None:
    journal = EventJournal(lambda: 5.0)
    for look in looks:
        found = seen(
            *(instance(state, *([grant(size * GIB)] if size else []), name=name) for name, (state, size) in look.items())
        )
        journal.compare(found, {}, {})
        count = len(journal.entries())
        journal.compare(found, {}, {})
        assert len(journal.entries()) == count
    entries = journal.entries()
    assert [one.number for one in entries] == list(range(1, len(entries) + 1))
    assert journal.entries(after=2) == entries[2:]


def test_only_the_last_five_hundred_are_kept() -> None:
    journal = EventJournal(lambda: 5.0)
    journal.compare(seen(), {}, {})
    for number in range(600):
        journal.compare(seen(), {"chat": str(number)}, {})
    entries = journal.entries()
    assert (len(entries), entries[0].number, entries[-1].number) == (500, 101, 600)
