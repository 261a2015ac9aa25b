"""Responses that are kept: bounded, by key, and not for ever."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.errors import NotFound
from aimgpu.gateway.dialects.response_store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _stored(identity: str, caller: str = "alice", previous: str | None = None, text: str = "x") -> StoredResponse:
    said: dict[str, Any] = {"type": "message", "role": "assistant", "content": text}
    asked = {"role": "user", "content": f"to {identity}"}
    response = {"id": identity, "output": [said]}
    return StoredResponse(caller=caller, response=response, input_items=[asked], input_bytes=len(text), previous=previous)


def test_a_conversation_is_read_from_its_beginning() -> None:
    store = ResponseStore()
    store.put(_stored("a"))
    store.put(_stored("b", previous="a"))
    assert [item["content"] for item in store.history("b", "alice")[0]] == ["to a", "x", "to b", "x"]


def test_another_key_finds_nothing_and_deletes_nothing() -> None:
    store = ResponseStore()
    store.put(_stored("a"))
    for attempt in (store.find, store.delete, store.history):
        with pytest.raises(NotFound):
            attempt("a", "mallory")
    assert store.find("a", "alice").response["id"] == "a"


def test_a_response_is_forgotten_after_a_while_without_use() -> None:
    clock = Clock()
    store = ResponseStore(kept_seconds=60, now=clock)
    store.put(_stored("a"))
    clock.now = 50
    store.find("a", "alice")
    clock.now = 100
    store.find("a", "alice")
    clock.now = 161
    with pytest.raises(NotFound):
        store.find("a", "alice")
    assert len(store) == 0


def test_going_on_keeps_the_whole_conversation() -> None:
    clock = Clock()
    store = ResponseStore(kept_seconds=60, now=clock)
    store.put(_stored("a"))
    clock.now = 40
    store.put(_stored("b", previous="a"))
    store.history("b", "alice")
    clock.now = 90
    assert len(store.history("b", "alice")[0]) == 4


def test_a_caller_pushes_out_its_own_responses_first() -> None:
    store = ResponseStore(most_bytes=40_000)
    store.put(_stored("hers", caller="bob"))
    for number in range(50):
        store.put(_stored(f"r{number}", text="y" * 1000))
    assert store.find("hers", "bob")
    assert store.total_bytes <= 40_000
    with pytest.raises(NotFound):
        store.find("r0", "alice")


def test_one_caller_has_a_quarter_of_it_to_the_byte() -> None:
    empty = len(orjson.dumps(_stored("a", text="").response))

    def of_bytes(size: int, identity: str = "a") -> StoredResponse:
        text = "y" * ((size - empty) // 2)  # counted as it was asked and as it is answered
        return _stored(identity, text=text)

    most = 4 * (2 * 500 + empty)
    store = ResponseStore(most_bytes=most)
    store.put(of_bytes(most // 4))
    assert store.total_bytes == most // 4
    larger = _stored("b", text="y" * 501)
    store.put(larger)
    with pytest.raises(NotFound):
        store.find("b", "alice")
    assert store.find("a", "alice")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["alice", "bob"]), st.integers(0, 9000), st.booleans())))
def test_what_is_kept_is_bounded_and_counted(steps: list[tuple[str, str, int, bool]]) -> None:
    store = ResponseStore(most_bytes=20_000)
    for identity, caller, size, deletes in steps:
        if deletes and (caller, identity) in store._entries:
            store.delete(identity, caller)
        else:
            store.put(_stored(identity, caller=caller, text="z" * size))
        assert store.total_bytes == sum(entry.size for entry in store._entries.values()) <= 20_000
