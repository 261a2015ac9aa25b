"""Every question to the driver fails in every way: the other GPUs are read, and what failed is a finding, never a crash."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.hardware.contract import check_reading
from tests.hardware_nvidia.fake_nvml import FakeLibrary, Fault, load_pynvml
from tests.hardware_nvidia.gpus import FakeGpu, FakeProcess, h200, l4

from aimgpu.domain import Device
from aimgpu.errors import AimGpuError, HardwareFailed, HardwareUnavailable, NotAllowed, PartitionBusy, UnknownDevice
from aimgpu.hardware.nvidia import nvml as codes
from aimgpu.hardware.nvidia.devices import product_name
from aimgpu.hardware.nvidia.facts import as_text
from aimgpu.hardware.nvidia.hardware import NvidiaHardware
from aimgpu.hardware.nvidia.instances import profile_kind
from aimgpu.hardware.nvidia.mps import MpsDaemons, limit_environment
from aimgpu.hardware.nvidia.nvml import Nvml, NvmlFailure, translate
from aimgpu.hardware.nvidia.recording import record_nvidia, summarize_nvidia
from aimgpu.units import GIB, MIB, PPM

Over = Callable[[FakeLibrary], Nvml]
UNHEARD_OF = 997
CODES = {
    "not supported": codes.NOT_SUPPORTED,
    "no permission": codes.NO_PERMISSION,
    "timeout": codes.TIMEOUT,
    "lost": codes.GPU_IS_LOST,
    "reset required": codes.RESET_REQUIRED,
    "no data": codes.NO_DATA,
    "unheard of": UNHEARD_OF,
}
OPENING = {"nvmlInitWithFlags", "nvmlDeviceGetCount_v2"}


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """nvidia-ml-py takes a while to load; it keeps the functions that it found, which each test lets it forget."""
    return load_pynvml(FakeLibrary([]))


@pytest.fixture
def over(module: ModuleType) -> Over:
    def make(library: FakeLibrary) -> Nvml:
        module._nvmlGetFunctionPointer_cache.clear()
        module.nvmlLib = library  # type: ignore[attr-defined]
        return Nvml(lambda: module)

    return make


def cut_up() -> FakeGpu:
    gpu = h200(mig_on=True)
    gpu.make("3g.71gb", 4)
    gpu.make("1g.18gb", 0)
    gpu.processes = [FakeProcess(77, GIB, instance=1)]
    return gpu


def machine() -> list[FakeGpu]:
    return [cut_up(), l4(1)]


def on(nvml: Nvml, folder: Path) -> NvidiaHardware:
    return NvidiaHardware(nvml, pci=folder, proc=folder, dev=folder)


def read_all(hardware: NvidiaHardware) -> tuple[Device, ...]:
    devices = check_reading_but_for_indices(hardware)
    usages = hardware.read_usage()
    assert len({usage.device_id for usage in usages}) == len(usages)
    for usage in usages:
        assert usage.used_bytes is None or usage.used_bytes >= 0
    return devices


def check_reading_but_for_indices(hardware: NvidiaHardware) -> tuple[Device, ...]:
    """A GPU that is left out keeps its number, which others are not given."""
    devices = hardware.read_devices()
    assert len({device.id for device in devices}) == len(devices)
    for device in devices:
        assert device.layout.name in {layout.name for layout in device.layouts}
        assert device.memory_bytes > 0
    return devices


@pytest.fixture(scope="module")
def asked(module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a look at this machine asks of the library."""
    library = FakeLibrary(machine())
    module._nvmlGetFunctionPointer_cache.clear()
    module.nvmlLib = library  # type: ignore[attr-defined]
    hardware = on(Nvml(lambda: module), tmp_path_factory.mktemp("asked"))
    check_reading(hardware)
    hardware.read_usage()
    hardware.inspect()
    assert len(set(library.calls)) > 20
    return sorted(set(library.calls) - OPENING)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_a_question_that_fails_once_leaves_out_at_most_its_gpu(over: Over, tmp_path: Path, asked: list[str], code: int) -> None:
    for function in asked:
        library = FakeLibrary(machine(), faults=[Fault(function, code)])
        found = {device.id for device in check_reading_but_for_indices(on(over(library), tmp_path))}
        assert found, function


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_a_question_that_always_fails_is_a_finding_where_gpus_are_missing(
    over: Over, tmp_path: Path, asked: list[str], code: int
) -> None:
    for function in asked:
        library = FakeLibrary(machine(), faults=[Fault(function, code, times=None)])
        hardware = on(over(library), tmp_path)
        devices = read_all(hardware)
        findings = hardware.inspect()
        if len(devices) < 2 or len(hardware.read_usage()) < 2:
            assert {finding.subject for finding in findings} & {"gpu0", "gpu1"}, function
        assert all(finding.text for finding in findings)


@pytest.mark.parametrize("function", sorted(OPENING))
@pytest.mark.parametrize("code", [codes.DRIVER_NOT_LOADED, codes.LIB_RM_VERSION_MISMATCH, codes.NO_PERMISSION, UNHEARD_OF])
def test_a_library_that_does_not_open_is_no_gpu_and_with_a_device_file_a_finding(
    over: Over, tmp_path: Path, function: str, code: int
) -> None:
    (tmp_path / "nvidiactl").touch()
    hardware = on(over(FakeLibrary(machine(), faults=[Fault(function, code, times=None)])), tmp_path)
    assert hardware.read_devices() == ()
    assert hardware.read_usage() == ()
    (finding,) = hardware.inspect()
    assert finding.code == "no-driver"
    assert str(tmp_path / "nvidiactl") in finding.text
    assert bool(finding.hint) == (code != UNHEARD_OF)
    with pytest.raises(UnknownDevice, match="there is no NVIDIA GPU"):
        hardware.apply_layout("GPU-1", "whole")


@pytest.mark.parametrize(
    ("code", "error", "word"),
    [
        (codes.NO_PERMISSION, NotAllowed, "root"),
        (codes.IN_USE, PartitionBusy, "Stop"),
        (codes.DRIVER_NOT_LOADED, HardwareUnavailable, "modprobe"),
        (codes.LIBRARY_NOT_FOUND, HardwareUnavailable, "container toolkit"),
        (codes.FUNCTION_NOT_FOUND, HardwareUnavailable, "too old"),
        (codes.GPU_IS_LOST, HardwareUnavailable, "Xid"),
        (codes.RESET_REQUIRED, HardwareUnavailable, "reset"),
        (codes.LIB_RM_VERSION_MISMATCH, HardwareUnavailable, "reboot"),
        (codes.TIMEOUT, HardwareFailed, "dmesg"),
        (UNHEARD_OF, HardwareFailed, ""),
    ],
)
def test_a_code_of_the_library_is_an_error_of_its_kind_with_what_to_do(code: int, error: type[AimGpuError], word: str) -> None:
    found = translate(NvmlFailure("nvmlDeviceSetMigMode", code, "it failed"), "cannot set whole on GPU-1")
    assert type(found) is error
    assert found.message == "cannot set whole on GPU-1: it failed (nvmlDeviceSetMigMode)"
    assert word in (found.hint or "")


def test_a_function_that_this_library_never_had_is_asked_once_and_answered_with_nothing(over: Over) -> None:
    nvml = over(FakeLibrary(machine()))
    assert nvml.ask("nvmlDeviceGetTheWeather") is None
    with pytest.raises(NvmlFailure, match="nvmlDeviceGetTheWeather") as caught:
        nvml.call("nvmlDeviceGetTheWeather")
    assert caught.value.code == codes.FUNCTION_NOT_FOUND


# --- recordings of machines that do not answer everything ---


@pytest.mark.parametrize("code", [codes.TIMEOUT, codes.NOT_SUPPORTED, codes.NO_PERMISSION])
def test_a_recording_holds_what_failed_and_what_is_claimed_from_it_is_what_was_answered(
    over: Over, asked: list[str], code: int
) -> None:
    for function in asked:
        nvml = over(FakeLibrary(machine(), faults=[Fault(function, code, times=None)]))
        recorded = record_nvidia(nvml)
        assert recorded is not None
        assert "GPU-00000000-0000-0000-0000-000000000001" not in json.dumps(recorded["devices"][1:])
        for device in summarize_nvidia(json.loads(json.dumps(recorded))):
            assert device.market_name.startswith("NVIDIA ")
            assert device.memory_bytes > 0
            assert device.layouts[0] == "whole"


# --- names ---


@pytest.mark.parametrize(
    ("market_name", "gib", "name"),
    [
        ("NVIDIA H200", 140.4, "H200-141"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100-80"),
        ("NVIDIA L4", 22.5, "L4-24"),
        ("NVIDIA GeForce RTX 4090", 23.9, "RTX-4090-24"),
        ("Tesla T4", 15, "T4-16"),
        ("NVIDIA GeForce RTX 4060 Ti", 16, "RTX-4060-Ti-16"),
        ("NVIDIA GeForce RTX 4060 Ti", 8, "RTX-4060-Ti-8"),
        ("NVIDIA TITAN RTX", 24, "TITAN-RTX-24"),
        ("NVIDIA GB200", 185, "GB200-185"),
        ("NVIDIA B200 180 GB", 179, "B200-180"),
        ("", 8, "unknown-8"),
        (None, 8, "unknown-8"),
    ],
)
def test_a_product_is_named_by_model_and_size(market_name: str | None, gib: float, name: str) -> None:
    assert product_name(market_name, round(gib * GIB)) == name


@pytest.mark.parametrize(
    ("text", "kind"),
    [("MIG 1g.18gb", "1g.18gb"), ("NVIDIA H200 MIG 1g.18gb+me", "1g.18gb+me"), ("1G.5GB", "1g.5gb"), ("", "")],
)
def test_a_kind_is_what_follows_the_last_mig(text: str, kind: str) -> None:
    assert profile_kind(text) == kind


@pytest.mark.parametrize(
    ("value", "text"), [(b"NVIDIA L4", "NVIDIA L4"), ("NVIDIA L4", "NVIDIA L4"), (b"", None), ("", None), (None, None)]
)
def test_text_of_either_version_of_the_binding_is_text(value: object, text: str | None) -> None:
    assert as_text(value) == text
    assert as_text(b"\xff") == "\N{REPLACEMENT CHARACTER}"


# --- files of MPS that a crash or a person left ---


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: MPS keeps Unix sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"GPU-" + b"9" * 500, b"../..", b"GPU-other", b"\x00" * 40], ids=repr)
def test_a_folder_whose_name_card_is_damaged_is_no_daemon_and_in_nobodys_way(root: Path, data: bytes) -> None:
    daemons = MpsDaemons(root, program=str(root / "absent"), wait_seconds=1)
    (root / "GPU-1").mkdir()
    (root / "GPU-1" / "uuid").write_bytes(data)
    assert daemons.running() == ()
    assert daemons.pids() == frozenset()
    assert not daemons.left_over()
    assert daemons.dismiss({"GPU-1"}) == ()


@pytest.mark.parametrize("note", ["", "{", "[]", "null", "7", '{"pid": 1}', '{"pid": "x", "start_ticks": 1, "boot_id": "b"}'])
def test_a_note_that_names_no_process_is_no_daemon(root: Path, note: str) -> None:
    daemons = MpsDaemons(root, program=str(root / "absent"), wait_seconds=1)
    (root / "GPU-1").mkdir()
    (root / "GPU-1" / "uuid").write_text("GPU-1")
    (root / "GPU-1" / "daemon.json").write_text(note)
    assert daemons.running() == ()
    assert daemons.tenants("GPU-1") == ()
    assert daemons.left_over()


@pytest.mark.parametrize("memory_bytes", [MIB, MIB + 1, 10 * GIB, 10 * GIB + MIB - 1])
@pytest.mark.parametrize("ppm", [10_000, 10_001, 333_333, 999_999, PPM, 2 * PPM])
def test_limits_are_rounded_down_and_never_above_what_was_granted(memory_bytes: int, ppm: int) -> None:
    found = limit_environment(memory_bytes, ppm, yields=True)
    mebibytes = int(found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].removeprefix("0=").removesuffix("M"))
    assert memory_bytes - MIB < mebibytes * MIB <= memory_bytes
    percent = int(found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    assert 1 <= percent <= 100
    assert percent * PPM <= max(ppm, PPM) * 100
    assert found["CUDA_MPS_CLIENT_PRIORITY"] == "1"
