"""Keys that expire, when one was used last, and which keys share what engines keep of prompts."""

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aimgpu.cli.commands.serve.keys import keys as command
from aimgpu.daemon.reloading_keys import ReloadingKeys
from aimgpu.errors import InvalidInput, NotAuthenticated
from aimgpu.gateway.auth import Caller, KeyTable, caller_of, identify
from aimgpu.keyfile import KeyClass, KeyStore, hash_key, read_last_used


def table(*callers: Caller) -> KeyTable:
    return KeyTable({hash_key(caller.name): caller for caller in callers})


def test_an_expired_key_opens_nothing_and_is_named_as_such() -> None:
    keys = table(Caller(name="old", expires=time.time() - 1), Caller(name="new", expires=time.time() + 3600))
    with pytest.raises(NotAuthenticated, match="expired"):
        identify(keys, {b"x-api-key": b"old"})
    assert identify(keys, {b"x-api-key": b"new"}).name == "new"


def test_the_last_use_of_a_key_survives_a_change_of_the_key_file() -> None:
    keys = table(Caller(name="a"), Caller(name="b"))
    identify(keys, {b"x-api-key": b"a"})
    used = keys.last_used()["a"]
    keys.replace({hash_key("a"): Caller(name="a"), hash_key("c"): Caller(name="c")}, required=True)
    assert keys.last_used() == {"a": used}


def test_what_a_daemon_noted_of_keys_is_shown_after_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    runner = CliRunner()
    made = runner.invoke(command, ["add", "alice", "--expires", "30d", "--answers", "64MiB", "--cache-group", "team"])
    assert made.exit_code == 0, made.output
    assert "group team" in made.output
    (stored,) = KeyStore(tmp_path / "keys.json").read()
    assert (stored.answer_bytes, stored.cache_group) == (64 << 20, "team")
    assert stored.expires is not None
    assert 29 * 86400 < stored.expires - time.time() <= 30 * 86400
    followed = ReloadingKeys(tmp_path / "keys.json")
    followed.start()
    identify(followed.table, {b"x-api-key": made.output.splitlines()[0].encode()})
    followed.stop()
    assert read_last_used(tmp_path / "keys.json").keys() == {"alice"}
    listed = runner.invoke(command, ["list", "--json"]).output
    assert '"last_used": 1' in listed.replace("\n", "")


@pytest.mark.parametrize("wrong", [{"expires": 0}, {"answer_bytes": -1}, {"cache_group": "a b"}, {"cache_group": ""}])
def test_a_key_cannot_have_a_limit_that_limits_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(InvalidInput):
        KeyStore(tmp_path / "keys.json").add("alice", KeyClass(**wrong))


def test_keys_share_what_engines_keep_only_within_a_group() -> None:
    alone, first, second = Caller(name="team"), Caller(name="a", cache_group="team"), Caller(name="b", cache_group="team")
    assert first.cache == second.cache != alone.cache
    assert table(first, second).cache_groups == 1
    assert table(first, second, alone).cache_groups == 2


def test_what_the_key_file_says_reaches_the_caller(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    store = KeyStore(tmp_path / "keys.json")
    store.add("alice", KeyClass(expires=2_000_000_000, answer_bytes=1, cache_group="g"))
    caller = caller_of(store.read()[0])
    assert (caller.expires, caller.answer_bytes, caller.cache_group) == (2_000_000_000, 1, "g")
