"""What `amd-smi` might print one day, or prints when it is broken: read as far as it makes sense, and nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.errors import HardwareFailed
from aimgpu.hardware.amd import AmdSmi, smi_json
from aimgpu.hardware.amd.command import CommandResult

ROW = {
    "gpu": 0,
    "bdf": "0000:05:00.0",
    "uuid": "11ff74a1-0000-1000-8012-000000000000",
    "kfd_id": 20001,
    "node_id": 1,
    "partition_id": 0,
    "render": "renderD128",
    "hip_id": 0,
    "hip_uuid": "GPU-11ff74a1",
}
NO_NUMBERS: list[Any] = [
    "N/A",
    "",
    None,
    "zero",
    "0x1",
    [],
    {},
    [1],
    {"unit": "B"},
    -1,
    "-5",
    float("inf"),
    float("nan"),
    1e999,
]
NO_TEXTS: list[Any] = ["N/A", "", None, 7, 1.5, True, [], ["0000:05:00.0"], {"address": "0000:05:00.0"}]


def answering(*printed: str, status: int = 0) -> AmdSmi:
    """Prints these one after the other, and the last one for ever."""
    left = list(printed)

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        return CommandResult(status=status, stdout=left.pop(0) if len(left) > 1 else left[0], stderr="")

    return AmdSmi(Path("amd-smi"), run)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_count_is_unknown(value: Any) -> None:
    assert smi_json.number(value) is None
    assert smi_json.size_bytes({"value": value, "unit": "MB"}) is None
    (gpu,) = smi_json.parse_list(json.dumps([ROW | {"kfd_id": value, "hip_id": value}]))
    assert (gpu.gpu, gpu.kfd_id, gpu.hip_id) == (0, None, None)


@pytest.mark.parametrize("value", NO_TEXTS, ids=repr)
def test_what_is_no_text_is_unknown(value: Any) -> None:
    assert smi_json.words(value) is None
    (gpu,) = smi_json.parse_list(json.dumps([ROW | {"bdf": value, "uuid": value, "render": value}]))
    assert (gpu.bdf, gpu.uuid, gpu.render) == (None, None, None)


@pytest.mark.parametrize("gpu", [value for value in NO_NUMBERS if value is not None], ids=repr)
def test_a_row_without_a_gpu_is_left_out_of_every_answer(gpu: Any) -> None:
    row = {
        "gpu": gpu,
        "partition": {"memory_partition": "NPS1"},
        "asic": {"market_name": "MI300X"},
        "mem_usage": {"total_vram": {"value": 1, "unit": "MB"}},
        "process_list": [{"process_info": {"pid": 1}}],
    }
    text = json.dumps([row])
    assert smi_json.parse_list(text) == ()
    assert smi_json.parse_partition_modes(text) == {}
    assert smi_json.parse_memory(text) == {}
    assert smi_json.parse_market_names(text) == {}
    assert smi_json.parse_processes(text) == ()


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        ("B", 3),
        ("KB", 3 << 10),
        ("MB", 3 << 20),
        ("GB", 3 << 30),
        ("TB", None),
        (None, None),
        ([], None),
        ({}, None),
        (5, None),
    ],
)
def test_a_size_in_a_unit_that_is_not_known_is_not_guessed(unit: Any, size: int | None) -> None:
    assert smi_json.size_bytes({"value": 3, "unit": unit}) == size
    text = json.dumps([{"gpu": 0, "mem_usage": {"total_vram": {"value": 3, "unit": unit}}}])
    assert smi_json.parse_memory(text) == ({} if size is None else {0: size})


@pytest.mark.parametrize("nested", ["partition", "asic", "mem_usage", "process_list"])
@pytest.mark.parametrize("value", [None, "N/A", 3, [], "No data", [[]], {"0": {}}], ids=repr)
def test_an_answer_of_another_shape_is_no_answer(nested: str, value: Any) -> None:
    text = json.dumps({"gpu_data": [{"gpu": 0, nested: value}]})
    assert smi_json.parse_memory(text) == {}
    assert smi_json.parse_market_names(text) == {}
    assert smi_json.parse_processes(text) == ()
    assert set(smi_json.parse_partition_modes(text).values()) <= {(None, None)}


@pytest.mark.parametrize("wrapper", ["gpu_data", "gpus", None])
def test_a_wrapper_of_another_name_is_one_row_of_its_own(wrapper: str | None) -> None:
    text = json.dumps({wrapper: [ROW]} if wrapper else [ROW])
    assert [gpu.gpu for gpu in smi_json.parse_list(text)] == ([] if wrapper == "gpus" else [0])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"gpu_data":' * 50_000, "[" * 100_000 + "]" * 100_000, "warning [\n" * 2000], ids=len
)
def test_brackets_without_end_are_no_json_and_do_not_stop_the_program(text: str) -> None:
    assert smi_json.rows(text) == []
    with pytest.raises(HardwareFailed, match="gave no data"):
        answering("nothing but words").read_gpus()


def test_an_answer_behind_many_brackets_of_a_prompt_is_found() -> None:
    text = "Proceed? [Y/N] " * 50 + json.dumps([ROW])
    assert [gpu.bdf for gpu in smi_json.parse_list(text)] == ["0000:05:00.0"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("ROCm version: 7.12.1", (7, 12)),
        ("ROCm version: 123456.0", (123456, 0)),
        (f"ROCm version: {'9' * 5000}.1", None),
        ("ROCm version: 7", None),
        ("rocm VERSION: 7.1", None),
        (json.dumps([{"rocm_version": "6.3.4"}]), (6, 3)),
        (json.dumps([{"rocm_version": 6.3}]), None),
        (json.dumps([{"rocm_version": ["6.3"]}]), None),
        (json.dumps({"gpu_data": [{"rocm_version": "N/A"}]}), None),
    ],
)
def test_a_version_is_two_numbers_or_unknown(text: str, version: tuple[int, int] | None) -> None:
    assert smi_json.parse_version(text) == version
    assert answering(text).read_version() == version


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("a\n\t30 | AMDSMI_STATUS_BUSY - Device busy\nb", ("BUSY", "30 | AMDSMI_STATUS_BUSY - Device busy")),
        ("AMDSMI_STATUS_SUCCESS\nAmdSmiInvalidParameterValueException: no CPX\n", ("InvalidParameterValue", "no CPX")),
        ("this requires elevation, sorry", ("PermissionDenied", "this requires elevation, sorry")),
        ("AMDSMI_STATUS_", None),
        ("AmdSmiException: nothing", None),
        ("", None),
    ],
)
def test_a_failure_is_found_in_the_words_with_its_own_line(text: str, failure: tuple[str, str] | None) -> None:
    assert smi_json.find_failure(text) == failure


# --- the tool as the backend uses it ---


def test_a_name_of_a_gpu_that_the_list_does_not_place_is_not_given_to_another() -> None:
    static = {"gpu_data": [{"gpu": 0, "asic": {"market_name": "first"}}, {"gpu": 1, "asic": {"market_name": "second"}}]}
    listed = [ROW | {"gpu": 1, "bdf": "0000:15:00.0"}, ROW | {"gpu": 0, "bdf": "N/A"}]
    assert answering(json.dumps(static), json.dumps(listed)).find_market_names() == {"0000:15:00.0": "second"}


def test_a_process_on_many_gpus_is_one_and_what_is_no_pid_is_none() -> None:
    rows = [
        {"gpu": gpu, "process_list": [{"process_info": {"pid": pid}} for pid in (77, "N/A", -1, None, "12")]}
        for gpu in range(3)
    ]
    assert answering(json.dumps(rows)).find_pids() == (12, 77)


def test_process_entries_without_their_wrapper_are_read_too() -> None:
    rows = [{"gpu": 0, "process_list": [{"pid": 5, "name": "a", "mem": {"value": 1, "unit": "KB"}}, 7, None, "no process"]}]
    (process,) = answering(json.dumps(rows)).read_processes()
    assert (process.pid, process.name, process.memory_bytes) == (5, "a", 1024)


READERS: dict[str, Callable[[AmdSmi], object]] = {
    "list": AmdSmi.read_gpus,
    "partition modes": AmdSmi.read_partition_modes,
    "memory": AmdSmi.read_memory,
    "processes": AmdSmi.read_processes,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("", "nothing"),
        ("Traceback\nModuleNotFoundError: no module amdsmi", "ModuleNotFoundError: no module amdsmi"),
        ("x\nAMDSMI_STATUS_DRIVER_NOT_LOADED - no driver\ny", "AMDSMI_STATUS_DRIVER_NOT_LOADED - no driver"),
        ("\x00\x01\x02", "\x00\x01\x02"),
    ],
)
def test_words_instead_of_data_are_an_error_with_the_telling_line_and_what_to_do(
    read: Callable[[AmdSmi], object], printed: str, reason: str
) -> None:
    with pytest.raises(HardwareFailed) as caught:
        read(answering(printed, status=1))
    assert caught.value.message.endswith(f"gave no data: {reason}")
    assert "by hand" in str(caught.value.hint)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=6) | st.just("N/A"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["value", "unit", "pid", "name"]), inner),
    max_leaves=6,
)


@settings(max_examples=examples(60))
@given(key=st.sampled_from([*ROW, "partition", "asic", "mem_usage", "process_list", "extra"]), value=_VALUES)
def test_whatever_stands_in_one_field_the_other_gpus_are_read(key: str, value: Any) -> None:
    whole = ROW | {"gpu": 1, "asic": {"market_name": "AMD Instinct MI300X"}}
    smi = answering(json.dumps({"gpu_data": [ROW | {key: value}, whole]}))
    assert whole["bdf"] in {gpu.bdf for gpu in smi.read_gpus() if gpu.gpu == 1}
    assert all(isinstance(gpu.bdf, str | None) for gpu in smi.read_gpus())
    assert all(size >= 0 for size in smi.read_memory().values())
    assert all(process.pid >= 0 for process in smi.read_processes())
    assert smi.find_market_names()[str(whole["bdf"])] == "AMD Instinct MI300X"
