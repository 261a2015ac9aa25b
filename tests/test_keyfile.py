"""The file of API keys: what is kept, what is refused, and what a damaged file does."""

import json
import math
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.daemon.reloading_keys import ReloadingKeys
from aimgpu.errors import Conflict, InvalidInput, NotFound
from aimgpu.keyfile import KeyClass, KeyStore, StoredKey, bearer_token, generate_key, hash_key, parse_keys

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._@-]{0,62}\Z")
classes = st.builds(
    KeyClass,
    models=st.none() | st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3).map(tuple),
    priority=st.sampled_from([None, "high", "medium", "low"]),
    requests_per_second=st.none() | st.floats(0.001, 1e6),
    concurrency=st.none() | st.integers(1, 10_000),
)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "home" / "keys.json")


@settings(max_examples=examples(15))
@given(st.dictionaries(names, classes, max_size=4))
def test_keys_read_back_with_what_they_may_do(tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, KeyClass]) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    store = KeyStore(path)
    made = {name: store.add(name, allowed) for name, allowed in wanted.items()}
    found = {key.name: key for key in store.read()}
    assert found.keys() == wanted.keys()
    for name, key in found.items():
        assert {field: getattr(key, field) for field in asdict(wanted[name])} == asdict(wanted[name])
        assert key.sha256 == hash_key(made[name])
        assert made[name] not in path.read_text()


def test_the_file_is_for_its_owner_alone(store: KeyStore, tmp_path: Path) -> None:
    store.add("alice")
    assert stat.S_IMODE((tmp_path / "home" / "keys.json").stat().st_mode) == 0o600


def test_keys_are_long_random_and_marked(store: KeyStore) -> None:
    made = {generate_key() for _ in range(50)}
    assert len(made) == 50
    assert all(key.startswith("aimgpu-") and len(key) >= 40 for key in made)


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", ".a", "a/b", "a\n", "ä", "a" * 64, "../a", 'a"'])
def test_what_cannot_be_a_name_is_refused_and_nothing_is_written(store: KeyStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be a key's name"):
        store.add(name)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("limits", [KeyClass(requests_per_second=math.nan), KeyClass(concurrency=0)])
def test_limits_that_could_not_be_read_again_are_refused_and_leave_the_other_keys(store: KeyStore, limits: KeyClass) -> None:
    store.add("first")
    with pytest.raises(InvalidInput, match="limits"):
        store.add("second", limits)
    assert [key.name for key in store.read()] == ["first"]


def test_a_name_is_taken_once_and_free_again_when_removed(store: KeyStore) -> None:
    first = store.add("alice")
    with pytest.raises(Conflict, match="'alice' already") as caught:
        store.add("alice")
    assert "aimgpu keys remove alice" in (caught.value.hint or "")
    assert [key.sha256 for key in store.read()] == [hash_key(first)]
    store.remove("alice")
    assert store.add("alice") != first


def test_removing_what_is_not_there_names_what_is(store: KeyStore) -> None:
    with pytest.raises(NotFound) as none:
        store.remove("alice")
    store.add("bob")
    store.add("carol")
    with pytest.raises(NotFound) as some:
        store.remove("alice")
    assert (none.value.hint, some.value.hint) == ("Keys: none.", "Keys: bob, carol.")
    assert [key.name for key in store.read()] == ["bob", "carol"]


def test_a_key_that_the_user_chose_replaces_the_one_of_its_name(store: KeyStore) -> None:
    store.add("alice", KeyClass(concurrency=1))
    store.put("environment", "k" * 32)
    store.put("environment", "n" * 32)
    assert [(key.name, key.concurrency) for key in store.read()] == [("alice", 1), ("environment", None)]
    assert store.read()[1].sha256 == hash_key("n" * 32)
    with pytest.raises(InvalidInput, match="at least 32 characters"):
        store.put("environment", "n" * 31)
    assert store.read()[1].sha256 == hash_key("n" * 32)


ROW: dict[str, Any] = asdict(StoredKey(name="a", sha256=hash_key("x"), created=1))
WRONG_ROWS: dict[str, dict[str, Any]] = {
    "no name": {"name": None},
    "a digest that is none": {"sha256": "abc"},
    "a digest in capitals": {"sha256": "A" * 64},
    "a digest that is a number": {"sha256": 5},
    "a date as text": {"created": "today"},
    "a date that is a truth value": {"created": True},
    "models as one text": {"models": "chat"},
    "models as a number": {"models": 5},
    "a model without a name": {"models": [None]},
    "an unknown priority": {"priority": "urgent"},
    "a rate as text": {"requests_per_second": "fast"},
    "a rate of nothing": {"requests_per_second": 0},
    "a rate that is no number": {"requests_per_second": float("nan")},
    "an endless rate": {"requests_per_second": float("inf")},
    "half a request at once": {"concurrency": 0.5},
    "none at once": {"concurrency": 0},
    "an unknown field": {"admin": True},
}


@pytest.mark.parametrize("change", WRONG_ROWS.values(), ids=WRONG_ROWS.keys())
def test_a_row_that_was_not_written_by_us_is_damage_and_no_key_without_limits(change: dict[str, Any], tmp_path: Path) -> None:
    """A limit that cannot be applied must not become no limit, nor end the thread that follows the file."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{**ROW, **change}]}))
    with pytest.raises(InvalidInput, match="is damaged") as caught:
        KeyStore(path).read()
    assert "aimgpu keys add" in (caught.value.hint or "")
    keys = ReloadingKeys(path)
    assert keys.table.required
    assert not len(keys.table)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "null",
        "{}",
        '{"keys": 5}',
        '{"keys": [5]}',
        '{"keys": {"a": 1}}',
        "[" * 100_000,
        '{"keys": [' + "9" * 5000 + "]}",
    ],
    ids=["empty", "open", "list", "number", "null", "no keys", "a number", "numbers", "an object", "deep", "digits"],
)
def test_a_file_that_is_no_key_file_is_damage(text: str) -> None:
    with pytest.raises(InvalidInput, match="the secret is damaged"):
        parse_keys(text, "the secret")


def test_bytes_that_are_no_text_are_damage_and_stay_for_a_look(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"\xff\xfe")
    for act in (KeyStore(path).read, lambda: KeyStore(path).add("a"), lambda: KeyStore(path).remove("a")):
        with pytest.raises(InvalidInput, match="is damaged"):
            act()
    assert path.read_bytes() == b"\xff\xfe"


def test_a_file_of_a_version_without_limits_is_read() -> None:
    (key,) = parse_keys(json.dumps({"keys": [{"name": "a", "sha256": hash_key("x"), "created": 1}]}), "it")
    assert (key.models, key.priority, key.requests_per_second, key.concurrency) == (None, None, None, None)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (b"Bearer abc", b"abc"),
        (b"bearer abc", b"abc"),
        (b"BEARER  abc ", b"abc"),
        (b"Bearer", b""),
        (b"Basic abc", None),
        (b"", None),
        (b"abc", None),
        (b"Bearerabc", None),
    ],
)
def test_a_token_is_taken_from_a_bearer_header_only(header: bytes, token: bytes | None) -> None:
    assert bearer_token(header) == token
