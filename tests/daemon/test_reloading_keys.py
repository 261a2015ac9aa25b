from pathlib import Path

import pytest

from aimgpu.daemon.reloading_keys import ReloadingKeys
from aimgpu.errors import InvalidInput
from aimgpu.keyfile import KeyClass, KeyStore


def test_a_key_counts_from_when_it_is_added_until_it_is_removed(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    first = store.add("alice", KeyClass(models=("chat",), priority="low"))
    keys = ReloadingKeys(tmp_path / "keys.json")
    alice = keys.find(first.encode())
    assert alice is not None
    assert (alice.name, alice.models) == ("alice", frozenset({"chat"}))
    second = store.add("bob")
    bob = keys.find(second.encode())
    assert bob is not None
    assert bob.name == "bob"
    store.remove("alice")
    assert keys.find(first.encode()) is None
    assert keys.find(second.encode()) == bob


def test_a_file_that_is_damaged_later_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = KeyStore(path).add("alice")
    keys = ReloadingKeys(path)
    path.write_text("{")
    assert keys.find(key.encode()) is not None
    assert keys.find(b"another") is None


def test_without_the_file_nobody_is_known(tmp_path: Path) -> None:
    key = KeyStore(tmp_path / "keys.json").add("alice")
    keys = ReloadingKeys(tmp_path / "keys.json")
    (tmp_path / "keys.json").unlink()
    assert keys.find(key.encode()) is None


@pytest.mark.parametrize("row", ['"sha256": "no digest"', '"sha256": "00", "priority": "highest"'])
def test_a_row_that_makes_no_sense_is_a_damaged_file(tmp_path: Path, row: str) -> None:
    (tmp_path / "keys.json").write_text(f'{{"keys": [{{"name": "a", "created": 0, {row}}}]}}')
    with pytest.raises(InvalidInput, match="damaged"):
        ReloadingKeys(tmp_path / "keys.json")


def test_the_first_key_counts_at_once_and_taking_the_last_away_opens_no_door(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    keys = ReloadingKeys(tmp_path / "keys.json")
    assert not keys.required
    key = store.add("alice")
    assert keys.required
    assert keys.find(key.encode()) is not None
    store.remove("alice")
    assert keys.required
    assert keys.find(key.encode()) is None


def test_where_other_machines_can_call_a_key_is_required_even_while_there_is_none(tmp_path: Path) -> None:
    assert ReloadingKeys(tmp_path / "keys.json", required=True).required
