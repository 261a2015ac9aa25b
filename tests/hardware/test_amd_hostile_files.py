"""Files of the kernel that hold other numbers than a GPU can have: nothing is invented from them and nothing runs away."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.hardware.contract import check_identity, check_reading, check_usage
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs
from tests.hardware.emulation.sysfs_tree import pci_path

from aimgpu.hardware.amd import AmdHardware, AmdSmi, Sysfs
from aimgpu.hardware.amd.recording import RecordedSysfs, record_amd
from aimgpu.hardware.amd.sysfs import parse_int, parse_modes, parse_properties
from aimgpu.hardware.amd.topology import NODES, read_nodes
from aimgpu.hardware.amd.vram import PROCESSES

SMI = AmdSmi(Path("/opt/rocm/bin/amd-smi"))
EXTREMES = ["0", "1", "4294967295", "18446744073709551615", "9" * 30, "9" * 6000, "0x10", "1.5", "-3", "many"]


def kernel_of(*parts: str, compute: str = "CPX") -> EmulatedKernel:
    kernel = EmulatedKernel(list(parts) or ["MI300X"])
    kernel.change_gpu(0, compute_mode=compute)
    kernel.add_process(os.getpid(), {(0, 0): 1 << 20})
    return kernel


def look(kernel: EmulatedKernel) -> AmdHardware:
    """Everything that is ever asked of the files."""
    hardware = AmdHardware(TreeSysfs(kernel), smi=SMI)
    devices = check_reading(hardware)
    check_usage(hardware, devices)
    hardware.inspect()
    return hardware


# --- single values ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("42", 42),
        ("0x1a", 26),
        (" 7\n", 7),
        ("18446744073709551615", (1 << 64) - 1),
        ("-1", None),
        ("", None),
        (None, None),
        ("12 MB", None),
        ("1e9", None),
        ("0x", None),
        ("\x00", None),
        ("9" * 5000, None),
    ],
)
def test_a_number_in_a_file_is_a_count_or_nothing(text: str | None, value: int | None) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("SPX, DPX, CPX", ("SPX", "DPX", "CPX")),
        ("SPX,DPX", ("SPX", "DPX")),
        ("spx\n", ("SPX",)),
        ("NPS1", ("NPS1",)),
        ("UNKNOWN", ()),
        ("Not supported", ()),
        ("SPX DPX", ()),
        (", ,", ()),
        ("SPX, ../../etc", ("SPX",)),
        ("1PX, S-X, CPX", ("CPX",)),
        ("", ()),
        (None, ()),
    ],
)
def test_a_list_of_modes_holds_modes_alone(text: str | None, modes: tuple[str, ...]) -> None:
    assert parse_modes(text) == modes


def test_properties_that_are_no_numbers_are_left_out_and_the_others_kept() -> None:
    text = "simd_count 1216\nname gfx942\nnegative -3\nempty \nspaced 1 2\nlong " + "9" * 5000 + "\n\nnum_xcc 8\nno-value"
    assert parse_properties(text) == {"simd_count": 1216, "num_xcc": 8}


@settings(max_examples=examples(100))
@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    assert all(value >= 0 for value in parse_properties(text).values())
    assert (parse_int(text) or 0) >= 0
    assert all(re.fullmatch(r"[A-Z][A-Z0-9]*", mode) for mode in parse_modes(text))


# --- every number of a node ---


NAMES = [
    *("cpu_cores_count", "simd_count", "simd_per_cu", "mem_banks_count", "num_xcc", "location_id", "domain", "vendor_id"),
    *("device_id", "gfx_target_version", "drm_render_minor", "unique_id", "hive_id", "caches_count", "io_links_count"),
]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_number_a_node_reports_the_gpu_is_read_or_left_out_and_the_other_one_is_read(name: str) -> None:
    kernel = kernel_of("MI300X", "MI300X", compute="DPX")
    path = f"{NODES}/1/properties"  # of the first partition of the first GPU
    whole = str(kernel.tree[path])
    assert f"{name} " in whole
    for value in EXTREMES:
        kernel.tree[path] = re.sub(rf"^{name} .*$", f"{name} {value}", whole, flags=re.MULTILINE)
        devices = look(kernel).read_devices()
        assert "amd-1122334455660100" in {device.id for device in devices}
        assert sum(len(layout.partitions) for device in devices for layout in device.layouts) < 1000


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize(
    "name",
    [
        "mem_info_vram_total",
        "mem_info_vram_used",
        "gpu_busy_percent",
        "device",
        "unique_id",
        "compute_partition_mem_alloc_mode",
    ],
)
def test_whatever_number_the_pci_device_reports_use_stays_within_sense(name: str, value: str) -> None:
    kernel = kernel_of("MI300X", "MI300X")
    kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/{name}"] = f"{value}\n"
    hardware = look(kernel)
    assert hardware.read_devices()[-1].id == "amd-1122334455660100"
    for usage in hardware.read_usage():
        assert usage.utilization_percent is None or 0 <= usage.utilization_percent <= 100


@pytest.mark.parametrize(
    "words", ["CPX, CPX, CPX", "CPX," * 2000, "SPX, " + "X" * 5000, "SPX, NPS1", "cpx", "SPX, DPX, QPX, CPX, TPX, OPX, HPX"]
)
@pytest.mark.parametrize("name", ["available_compute_partition", "available_memory_partition", "current_memory_partition"])
def test_whatever_modes_are_listed_each_layout_is_listed_once(name: str, words: str) -> None:
    kernel = kernel_of()
    kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/{name}"] = f"{words}\n"
    look(kernel)


def test_a_memory_mode_of_a_thousand_digits_is_no_memory_mode() -> None:
    kernel = kernel_of()
    path = pci_path(kernel.machine.gpus[0])
    for name in ("available_memory_partition", "current_memory_partition"):
        kernel.tree[f"{path}/{name}"] = "NPS" + "9" * 5000 + "\n"
    assert len(look(kernel).read_devices()[0].layout.partitions) == 8


def test_nodes_whose_names_are_no_numbers_are_not_looked_at() -> None:
    kernel = kernel_of()
    for name in ("x", "-1", "1.0", "0x2", ".."):
        kernel.tree[f"{NODES}/{name}/gpu_id"] = "77\n"
        kernel.tree[f"{NODES}/{name}/properties"] = "vendor_id 4098\n"
    assert len(read_nodes(TreeSysfs(kernel))) == 8


def test_nodes_are_counted_as_the_runtime_counts_them_also_past_one_that_is_no_use() -> None:
    """ROCr numbers every GPU node that it sees; an index that skipped one would select the neighbour."""
    kernel = kernel_of()
    third = f"{NODES}/3/mem_banks/0/properties"
    assert third in kernel.tree
    kernel.tree[third] = "heap_type 0\n"  # no local memory: not a partition that could be given away
    nodes = read_nodes(TreeSysfs(kernel))
    assert [node.ordinal for node in nodes] == [0, 1, *range(3, 8)]


# --- processes ---


@pytest.mark.parametrize("value", EXTREMES)
def test_whatever_a_process_is_said_to_hold_it_is_named_and_counted_from_nothing_up(value: str) -> None:
    kernel = kernel_of()
    (path,) = [path for path in kernel.tree if path.startswith(f"{PROCESSES}/{os.getpid()}/vram_")]
    kernel.tree[path] = f"{value}\n"
    (usage,) = look(kernel).read_usage()
    assert {process.pid for process in usage.processes} == {os.getpid()}
    assert all((process.memory_bytes or 0) >= 0 for process in usage.processes)
    assert all(size >= 0 for size in usage.used_bytes_by_partition.values())


@pytest.mark.parametrize("name", ["vram_", "vram_x", "vram_-1", "sdma_7", "vram_99999999999999999999", "stats"])
def test_a_file_of_a_process_that_names_no_gpu_of_ours_counts_nowhere(name: str) -> None:
    kernel = kernel_of()
    kernel.tree[f"{PROCESSES}/{os.getpid()}/{name}"] = f"{1 << 40}\n"
    (usage,) = look(kernel).read_usage()
    assert sum(usage.used_bytes_by_partition.values()) == 1 << 20


# --- on a disk ---


def test_a_file_larger_than_any_of_the_kernels_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"7" * (1 << 22))
    text = Sysfs(tmp_path).read("large")
    assert text is not None
    assert len(text) == 1 << 16


def test_bytes_that_are_no_text_and_folders_in_the_place_of_files_are_read_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe12")
    (tmp_path / "folder").mkdir()
    sysfs = Sysfs(tmp_path)
    assert sysfs.read("noise") == "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}12"
    assert sysfs.read_int("noise") is None
    assert sysfs.read("folder") is None
    assert sysfs.list("noise") == []
    assert sysfs.read_all("folder", ["a", "b"]) == [b"", b""]
    assert sysfs.read_all("absent", ["a", "b"]) == [b"", b""]
    assert sysfs.open_all("folder", ["a"]) == []
    assert sysfs.stamp("absent") is None
    assert sysfs.why_not_writable("folder") is not None


def test_many_files_are_opened_all_or_none(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    sysfs = Sysfs(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert sysfs.open_all(".", ["a", "b", "missing"]) == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    opened = sysfs.open_all(".", ["a", "b"])
    assert [os.pread(descriptor, 9, 0) for descriptor in opened] == [b"a", b"b"]
    for descriptor in opened:
        os.close(descriptor)


# --- recordings of such a machine ---


@pytest.mark.parametrize("text", ["", "not hexadecimal", "-5", "serial of a person"])
def test_a_machine_whose_id_is_no_number_is_recorded_without_it(text: str) -> None:
    kernel = kernel_of()
    kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/unique_id"] = f"{text}\n"
    recorded = record_amd(TreeSysfs(kernel))
    assert recorded is not None
    assert not text or text not in json.dumps(recorded)
    played = AmdHardware(RecordedSysfs(recorded["files"]), smi=SMI)
    check_identity(played, check_reading(played))


@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_recording_that_lost_files_is_played_back_as_far_as_it_goes(data: st.DataObject) -> None:
    recorded = record_amd(TreeSysfs(kernel_of(compute="DPX")))
    assert recorded is not None
    files: dict[str, str] = recorded["files"]
    lost = data.draw(st.sets(st.sampled_from(sorted(files)), max_size=12))
    hardware = AmdHardware(RecordedSysfs({path: text for path, text in files.items() if path not in lost}), smi=SMI)
    check_usage(hardware, check_reading(hardware))
    hardware.inspect()
