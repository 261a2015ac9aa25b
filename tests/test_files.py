"""Files that a user named and that are none, or have no end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.control.stack.stack_file import read_stack_text
from aimgpu.errors import InvalidStackFile
from aimgpu.files import read_bounded, write_private

MIB = 1 << 20


def test_a_file_is_read_whole_up_to_the_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * MIB)
    assert read_bounded(file, MIB) == b"x" * MIB
    with pytest.raises(OSError, match="larger than"):
        read_bounded(file, MIB - 1)


def test_a_device_without_end_is_left_at_the_bound() -> None:
    with pytest.raises(OSError, match="larger than"):
        read_bounded(Path("/dev/zero"), 4 * MIB)
    with pytest.raises(InvalidStackFile, match="larger than"):
        read_stack_text(Path("/dev/zero"))


def test_a_pipe_by_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stack.yaml")
    with pytest.raises(InvalidStackFile, match="it is a pipe"):
        read_stack_text(tmp_path / "stack.yaml")


def test_what_another_command_writes_is_read() -> None:
    """As in `aimgpu plan -f <(command)`."""
    with subprocess.Popen(["/bin/echo", "models: {}"], stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        assert read_bounded(Path(f"/dev/fd/{echo.stdout.fileno()}"), MIB) == b"models: {}\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("[" * 100_000, "is not JSON"), ('{"a": ' + "9" * 5000 + "}", "is not JSON"), ("[]", "not a snapshot")],
)
def test_a_snapshot_that_is_none_is_refused_by_name(
    content: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    (tmp_path / "s.json").write_text(content)
    (tmp_path / "stack.yaml").write_text("models: {a: {model: Qwen/Qwen3-8B}}\n")
    assert run_command(["plan", "-f", str(tmp_path / "stack.yaml"), "--snapshot", str(tmp_path / "s.json")]) == 2
    assert complaint in capsys.readouterr().err


def test_a_private_write_is_readable_by_its_owner_alone_and_replaces_the_file_whole(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("old")
    target.chmod(0o644)
    write_private(target, "new")
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_private_write_that_fails_leaves_the_old_content_and_no_scratch_file(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_private(target, "\ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_changes_under_the_lock_by_many_processes_are_all_kept(tmp_path: Path) -> None:
    target = tmp_path / "count"
    target.write_text("0")
    program = (
        "import sys, pathlib\nfrom aimgpu.files import locked, write_private\npath = pathlib.Path(sys.argv[1])\n"
        "for _ in range(20):\n    with locked(path):\n        write_private(path, str(int(path.read_text()) + 1))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(target)]) for _ in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert target.read_text() == "80"
