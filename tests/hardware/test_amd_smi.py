"""AMD's tool: every shape of its output, and every way in which it can fail to give one."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs

from aimgpu.errors import HardwareFailed, HardwareUnavailable, PartitionBusy
from aimgpu.hardware.amd import AmdHardware, AmdSmi, smi_json
from aimgpu.hardware.amd.change import Patience
from aimgpu.hardware.amd.command import CommandResult, run_command

LIST = [
    {
        "gpu": 0,
        "bdf": "0000:05:00.0",
        "uuid": "11ff74a1",
        "kfd_id": 20001,
        "node_id": 1,
        "partition_id": 0,
        "render": "renderD128",
    }
]
OLD_LIST = [{"gpu": 0, "bdf": "0000:05:00.0", "uuid": "11ff74a1"}]


def test_a_list_and_a_wrapper_are_the_same() -> None:
    row = {"gpu": 0, "partition": {"accelerator_partition": "CPX", "memory_partition": "NPS4", "partition_id": 0}}
    for shape in ([row], {"gpu_data": [row]}):
        assert smi_json.parse_partition_modes(json.dumps(shape)) == {0: ("CPX", "NPS4")}


def test_renamed_keys_are_the_same() -> None:
    old = [{"gpu": 0, "partition": {"compute_partition": "SPX", "memory_partition": "NPS1"}}]
    assert smi_json.parse_partition_modes(json.dumps(old)) == {0: ("SPX", "NPS1")}


def test_secondary_partitions_know_no_mode() -> None:
    rows = [{"gpu": 1, "partition": {"accelerator_partition": "N/A", "memory_partition": "N/A", "partition_id": 1}}]
    assert smi_json.parse_partition_modes(json.dumps(rows)) == {1: (None, None)}


def test_older_lists_lack_columns() -> None:
    assert smi_json.parse_list(json.dumps(LIST))[0].kfd_id == 20001
    assert smi_json.parse_list(json.dumps(OLD_LIST))[0].kfd_id is None


def test_continuation_rows_and_strange_rows_are_left_out() -> None:
    assert smi_json.parse_list(json.dumps([{"gpu": ""}, 3, None, *LIST])) == smi_json.parse_list(json.dumps(LIST))


def test_json_is_found_behind_warnings_and_prompts() -> None:
    text = f"\n   ******WARNING******\n Use {{modprobe}}\nDo you accept these terms? [Y/N] \n{json.dumps(LIST)}\n"
    assert smi_json.find_json(text) == LIST


@pytest.mark.parametrize("text", ["", "nothing", "[", "{]", "[Y/N]", "\x00\xff[", '{"gpu": '])
def test_garbled_output_holds_no_json(text: str) -> None:
    assert smi_json.find_json(text) is None
    assert smi_json.rows(text) == []


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    smi_json.parse_list(text)
    smi_json.parse_partition_modes(text)
    smi_json.parse_processes(text)
    smi_json.parse_market_names(text)
    smi_json.parse_version(text)
    smi_json.find_failure(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["gpu", "gpu_data", "partition", "process_list", "process_info", "pid", "mem_usage", "value", "asic"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(_JSON)
def test_no_json_breaks_the_parsers(value: object) -> None:
    text = json.dumps(value)
    smi_json.parse_list(text)
    smi_json.parse_partition_modes(text)
    smi_json.parse_processes(text)
    smi_json.parse_market_names(text)
    smi_json.parse_version(text)


def test_processes_are_read_and_none_is_a_sentence() -> None:
    info = {"name": "python3", "pid": 4242, "mem_usage": {"value": 17, "unit": "B"}}
    text = json.dumps([{"gpu": 0, "process_list": [{"process_info": info}]}])
    assert smi_json.parse_processes(text) == (smi_json.SmiProcess(gpu=0, pid=4242, name="python3", memory_bytes=17),)
    nothing = json.dumps([{"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]}])
    assert smi_json.parse_processes(nothing) == ()


def test_process_memory_falls_back_to_the_graphics_driver() -> None:
    info = {"pid": 1, "mem_usage": "N/A", "memory_usage": {"vram_mem": {"value": 2, "unit": "MB"}}}
    (process,) = smi_json.parse_processes(json.dumps([{"gpu": 0, "process_list": [{"process_info": info}]}]))
    assert process.memory_bytes == 2 << 20


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ({"value": 196592, "unit": "MB"}, 206141652992),
        ({"value": "N/A", "unit": "MB"}, None),
        ("N/A", None),
        ("", None),
        (5, 5),
        ({"value": 1, "unit": "furlong"}, None),
    ],
)
def test_sizes(value: object, size: int | None) -> None:
    assert smi_json.size_bytes(value) == size


def test_market_names_that_are_not_known_are_left_out() -> None:
    rows = {
        "gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}}, {"gpu": 1, "asic": {"market_name": "N/A"}}]
    }
    assert smi_json.parse_market_names(json.dumps(rows)) == {0: "AMD Instinct MI300X"}


def test_versions_in_text_and_json() -> None:
    assert smi_json.parse_version("AMDSMI Tool: 26.2.1 | ROCm version: 7.2.0 | amdgpu version: 6.12") == (7, 2)
    assert smi_json.parse_version(json.dumps([{"tool": "AMDSMI Tool", "rocm_version": "10.1.0"}])) == (10, 1)
    assert smi_json.parse_version("ROCm version: N/A") is None


def test_success_is_no_failure() -> None:
    assert smi_json.find_failure("AMDSMI_STATUS_SUCCESS") is None
    assert smi_json.find_failure("Successfully set accelerator partition to CPX (profile #3)") is None


def answering(text: str, status: int = 0) -> AmdSmi:
    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        return CommandResult(status=status, stdout=text, stderr="")

    return AmdSmi(Path("amd-smi"), run)


def test_a_text_error_under_json_is_an_error_with_its_words() -> None:
    with pytest.raises(HardwareFailed, match="AMDSMI_STATUS_NOT_INIT"):
        answering("Error code:\n\t32 | AMDSMI_STATUS_NOT_INIT - Device not initialized", 0).read_gpus()
    with pytest.raises(HardwareFailed, match="Drivers not loaded"):
        answering("ERROR:root:Drivers not loaded (amdgpu drivers not found in modules)").read_gpus()
    with pytest.raises(HardwareFailed, match="nothing"):
        answering("").read_gpus()


def test_a_device_without_a_name_is_named_by_the_tool_and_holders_unseen_too() -> None:
    static = {"gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI399X"}}]}
    process = [{"gpu": 0, "process_list": [{"process_info": {"pid": 4242}}]}]

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        said = {"static": static, "process": process, "list": LIST}[argv[1]]
        return CommandResult(status=0, stdout=json.dumps(said), stderr="")

    kernel = EmulatedKernel(["MI300X"])
    for path in [path for path in kernel.tree if path.endswith("/product_name")]:
        del kernel.tree[path]
    kernel.tree[next(path for path in kernel.tree if path.endswith("00.0/device"))] = "0x74ff\n"
    kernel.faults["current_compute_partition"] = _busy
    hardware = AmdHardware(TreeSysfs(kernel), smi=AmdSmi(Path("amd-smi"), run), patience=Patience(tries=1))
    (device,) = hardware.read_devices()
    assert device.market_name == "AMD Instinct MI399X"
    with pytest.raises(PartitionBusy, match="pid 4242"):
        hardware.apply_layout(device.id, "CPX")


def test_a_tool_that_does_not_work_names_nothing() -> None:
    assert answering("Traceback").find_market_names() == {}
    assert answering("Traceback").find_pids() == ()


def _busy() -> None:
    raise OSError(errno.EBUSY, "busy")


def test_a_missing_tool_is_said_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HardwareUnavailable) as caught:
        AmdSmi(tmp_path / "amd-smi").read_gpus()
    assert "amd-smi" in str(caught.value.hint)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("aimgpu.hardware.amd.smi._USUAL_PLACES", ())
    assert not AmdSmi().is_installed
    with pytest.raises(HardwareUnavailable):
        AmdSmi().read_version()


def test_a_tool_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "amd-smi"
    broken.write_text("no program")
    broken.chmod(0o755)
    with pytest.raises(HardwareUnavailable, match="cannot be run"):
        AmdSmi(broken).read_gpus()


PATIENCE = (1, 10, 100)  # seconds: a loaded machine may stop the script before it has begun


def test_a_tool_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    children = tmp_path / "pid"
    program = tmp_path / "amd-smi"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {children}.part; mv {children}.part {children}\nwait\n")
    program.chmod(0o755)
    for seconds in PATIENCE:
        with pytest.raises(HardwareFailed, match=f"no answer within {seconds}s"):
            AmdSmi(program, seconds=seconds).read_gpus()
        if children.exists():
            break
    child = Path("/proc") / children.read_text().strip()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "Z" not in (child / "stat").read_text().split()[2]:
            time.sleep(0.01)  # the kill is delivered, not yet seen


def test_a_tool_whose_child_keeps_its_output_open_is_given_up_too(tmp_path: Path) -> None:
    note = tmp_path / "child"
    script = f"setsid sh -c 'echo $$ > {note}.part; mv {note}.part {note}; exec sleep 600' & sleep 600"
    for seconds in PATIENCE:
        with pytest.raises(HardwareFailed, match=f"no answer within {seconds}s"):
            run_command(["sh", "-c", script], timeout_seconds=seconds)
        if note.exists():
            break
    os.kill(int(note.read_text()), signal.SIGKILL)


def test_a_tool_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in the driver: the signal is sent and nothing happens."""
    started: list[int] = []
    monkeypatch.setattr("aimgpu.hardware.amd.command.os.killpg", lambda pid, _signal: started.append(pid))
    monkeypatch.setattr("aimgpu.hardware.amd.command._END_SECONDS", 0.1)
    with pytest.raises(HardwareFailed, match="cannot be stopped"):
        run_command(["sleep", "600"], timeout_seconds=0.1)
    monkeypatch.undo()
    os.killpg(started[0], signal.SIGKILL)


def test_a_prompt_is_answered() -> None:
    outcome = run_command([sys.executable, "-c", "print(input('sure? '))"], timeout_seconds=60, answer="y\n")
    assert outcome.stdout == "sure? y\n"
    assert outcome.status == os.EX_OK
