import threading
from pathlib import Path

import pytest
from tests.daemon.running import wait_for

from aimgpu.daemon.reloading_keys import ReloadingKeys
from aimgpu.gateway.auth import Caller
from aimgpu.keyfile import KeyClass, KeyStore


def find(keys: ReloadingKeys, key: str) -> Caller | None:
    keys.refresh()
    return keys.table.find(key.encode())


def test_a_key_counts_from_when_it_is_added_until_it_is_removed(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    first = store.add("alice", KeyClass(models=("chat",), priority="low"))
    keys = ReloadingKeys(tmp_path / "keys.json")
    alice = find(keys, first)
    assert alice is not None
    assert (alice.name, alice.models) == ("alice", frozenset({"chat"}))
    second = store.add("bob")
    bob = find(keys, second)
    assert bob is not None
    assert bob.name == "bob"
    store.remove("alice")
    assert find(keys, first) is None
    assert find(keys, second) == bob


def test_the_file_is_followed_while_it_runs(tmp_path: Path) -> None:
    keys = ReloadingKeys(tmp_path / "keys.json")
    keys.start()
    try:
        key = KeyStore(tmp_path / "keys.json").add("alice")
        wait_for(lambda: keys.table.find(key.encode()), "the key counts without anybody asking for it")
        assert keys.table.required
    finally:
        keys.stop()


def test_a_file_that_is_damaged_later_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = KeyStore(path).add("alice")
    keys = ReloadingKeys(path)
    path.write_text("{")
    assert find(keys, key) is not None
    assert find(keys, "another") is None


def test_without_the_file_nobody_is_known(tmp_path: Path) -> None:
    key = KeyStore(tmp_path / "keys.json").add("alice")
    keys = ReloadingKeys(tmp_path / "keys.json")
    (tmp_path / "keys.json").unlink()
    assert find(keys, key) is None


@pytest.mark.parametrize("text", ["{", '{"keys": [{"name": "a", "created": 0, "sha256": "no digest"}]}'])
def test_a_file_that_is_damaged_at_the_start_lets_nobody_in_and_keeps_nothing_from_starting(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    keys = ReloadingKeys(path)
    assert keys.table.required
    assert not len(keys.table)
    path.unlink()
    assert find(keys, KeyStore(path).add("alice")) is not None, "the way in once it is moved away"


def test_the_first_key_counts_and_taking_the_last_away_opens_no_door(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    keys = ReloadingKeys(tmp_path / "keys.json")
    assert not keys.table.required
    key = store.add("alice")
    assert find(keys, key) is not None
    assert keys.table.required
    store.remove("alice")
    assert find(keys, key) is None
    assert keys.table.required


def test_where_other_machines_can_call_a_key_is_required_even_while_there_is_none(tmp_path: Path) -> None:
    assert ReloadingKeys(tmp_path / "keys.json", required=True).table.required


def test_keys_added_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    threads = [threading.Thread(target=KeyStore(path).add, args=(f"caller-{number}",)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in KeyStore(path).read()} == {f"caller-{number}" for number in range(24)}
