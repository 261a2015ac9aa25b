"""Files that a user named and that are none, or have no end."""

import os
import subprocess
from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.control.bounded_files import read_bounded
from aimgpu.control.stack.stack_file import read_stack_text
from aimgpu.errors import InvalidStackFile

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
