"""The daemon's folder where it cannot be made, belongs to others, or holds what no daemon wrote."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.errors import AimGpuError, LedgerFull, NotAllowed, describe_os_error, from_os_error
from aimgpu.home import DaemonRecord, Home, failed_log, find_home
from aimgpu.procfs import read_boot_id, read_start_ticks

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def own_record() -> DaemonRecord:
    ticks = read_start_ticks(os.getpid())
    assert ticks is not None
    return DaemonRecord(
        pid=os.getpid(), start_ticks=ticks, boot_id=read_boot_id(), host="127.0.0.1", port=1, url="http://127.0.0.1:1"
    )


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"AIMGPU_HOME": "~/gpus"}, Path.home() / "gpus"),
        ({"AIMGPU_HOME": "", "XDG_STATE_HOME": "/s"}, Path("/s/aimgpu")),
        ({"XDG_STATE_HOME": ""}, Path.home() / ".local/state/aimgpu"),
        ({"XDG_STATE_HOME": "state"}, Path.home() / ".local/state/aimgpu"),
    ],
)
def test_the_home_is_the_same_from_every_folder(
    environment: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the XDG rules a relative path is ignored; else every folder would have a daemon of its own."""
    monkeypatch.chdir(tmp_path)
    assert find_home(environment).path == folder


def test_a_file_in_the_way_of_the_folder_is_named_with_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    for path in (tmp_path / "home", tmp_path / "home" / "below"):
        with pytest.raises(NotAllowed) as caught:
            Home(path).create()
        assert str(path) in caught.value.message
        assert "AIMGPU_HOME" in (caught.value.hint or "")


def test_a_folder_that_the_kernel_refuses_is_named_with_what_to_set() -> None:
    with pytest.raises(NotAllowed, match="cannot make the folder /proc/aimgpu") as caught:
        Home(Path("/proc/aimgpu")).create()
    assert "AIMGPU_HOME" in (caught.value.hint or "")


def test_a_folder_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o750)
    home.create()
    home.create()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o750


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o700)
    os.chown(home.path, NOBODY, NOBODY)
    with pytest.raises(NotAllowed, match="another user can write"):
        home.create()


@needs_root
def test_a_token_of_another_user_says_whose_command_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.token_file.write_text("secret")
    home.token_file.chmod(0o600)
    with as_nobody(), pytest.raises(NotAllowed, match="another user") as caught:
        home.read_token()
    assert "user who started the daemon" in (caught.value.hint or "")


def test_a_token_is_read_without_its_line_end_and_may_be_absent(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.read_token() is None
    home.token_file.write_text("secret\n")
    assert home.read_token() == "secret"


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "5", '"text"', "{}", '{"pid": 1, "extra": 2}', "[" * 100_000, '{"pid": ' + "9" * 5000 + "}", "NaN"],
    ids=["empty", "null", "list", "number", "text", "object", "unknown", "deep", "digits", "nan"],
)
def test_a_record_that_no_daemon_wrote_is_no_daemon(tmp_path: Path, text: str) -> None:
    home = Home(tmp_path)
    home.daemon_file.write_text(text)
    assert home.read_daemon() is None


@pytest.mark.parametrize(
    "change",
    [{"pid": "1"}, {"pid": -1}, {"pid": None}, {"start_ticks": "x"}, {"boot_id": None}, {"pid": "../self"}, {"pid": True}],
)
def test_a_record_with_a_wrong_value_is_no_daemon(tmp_path: Path, change: dict[str, object]) -> None:
    home = Home(tmp_path)
    home.daemon_file.write_text(json.dumps(asdict(own_record()) | change))
    assert home.read_daemon() is None


def test_a_record_of_an_earlier_boot_is_no_daemon(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.write_daemon(replace(own_record(), boot_id="earlier"))
    assert home.read_daemon() is None
    home.write_daemon(own_record())
    assert home.read_daemon() == own_record()


def test_a_home_for_planning_learns_and_leaves_the_other_as_it_is(tmp_path: Path) -> None:
    known, fresh = Home(tmp_path / "known"), Home(tmp_path / "fresh")
    known.create()
    known.catalogue_file.write_text("id,parameters\n")
    known.simulated_file.write_text("{}")
    known.token_file.write_text("secret")
    fresh.learn_from(known)
    assert sorted(path.name for path in fresh.path.iterdir()) == ["catalogue.csv", "simulated-gpus.json"]
    fresh.catalogue_file.write_text("changed")
    assert known.catalogue_file.read_text() == "id,parameters\n"


def test_files_of_a_home_have_names_of_their_own(tmp_path: Path) -> None:
    home = Home(tmp_path)
    files = [
        home.token_file,
        home.daemon_file,
        home.keys_file,
        home.catalogue_file,
        home.measurements_file,
        home.simulated_file,
        home.ledger_file,
        home.log_file,
        home.failed_log("chat"),
    ]
    assert len(set(files)) == len(files)
    assert all(file.is_relative_to(tmp_path) for file in files)
    assert home.failed_log("chat") == failed_log(tmp_path, "chat")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        ("ENOSPC", LedgerFull),
        ("EDQUOT", LedgerFull),
        ("EACCES", NotAllowed),
        ("EPERM", NotAllowed),
        ("EROFS", NotAllowed),
        ("EIO", AimGpuError),
        ("ENOENT", AimGpuError),
    ],
)
def test_an_error_of_the_system_becomes_one_of_ours_that_names_the_file(number: str, kind: type[AimGpuError]) -> None:

    code = getattr(errno, number)
    found = from_os_error(OSError(code, os.strerror(code), "/state/token"))
    assert type(found) is kind
    assert found.message == f"{os.strerror(code)}: /state/token"
    assert "AIMGPU_HOME" in (found.hint or "")


@settings(max_examples=examples(30))
@given(st.text(max_size=20), st.none() | st.text(min_size=1, max_size=20))
def test_a_description_has_what_was_refused_and_where(what: str, where: str | None) -> None:
    described = describe_os_error(OSError(5, what, where) if where else OSError(5, what))
    assert what in described
    assert where is None or described.endswith(where)


def test_an_error_without_a_number_keeps_its_text() -> None:
    assert describe_os_error(OSError("the cable is out")) == "the cable is out"
