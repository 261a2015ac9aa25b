"""AMD's own tools, unmodified, believe the emulated machines: they, our reader and the simulator say the same of each."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from tests.downloads import DownloadFailed
from tests.hardware import contract
from tests.hardware.emulation.fuse import mounted
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader
from tests.hardware.emulation.sysfs_tree import write_tree
from tests.hardware.emulation.tools import TOOL_SETS, ToolRoom, ToolSet, tool_room, unpack, why_not

from aimgpu.domain import Device, Layout
from aimgpu.errors import LayoutNotApplied, PartitionBusy
from aimgpu.hardware.amd import AmdHardware, AmdSmi, Sysfs, smi_json
from aimgpu.hardware.amd.change import Patience
from aimgpu.hardware.amd.gpus import read_gpus
from aimgpu.hardware.amd.writers import SmiWriter
from aimgpu.hardware.simulated import SimulatedHardware, known_products
from aimgpu.units import MIB

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

AMD_PARTS = [part.name for part in known_products() if part.chip]
ROUNDS = 7  # the most layouts that a part has: after these, every layout of every part was shown
GPU0 = "amd-1122334455660000"
HELD_BYTES = 3 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An emulated machine, and a tool set that sees it."""

    kernel: EmulatedKernel
    tree: Path
    room: ToolRoom

    def read(self) -> tuple[Device, ...]:
        return AmdHardware(Sysfs(self.tree)).read_devices()


NEWEST, *OLDER = [tools for tools in TOOL_SETS if "amd-smi" in tools.packages]


def rest(*values: object) -> ParameterSet:
    """Of the tier rest: other releases are downloaded first, and each call of a tool takes a second of CPU."""
    return pytest.param(*values, marks=pytest.mark.rest)


with_amd_smi = pytest.mark.parametrize(
    "tools", [NEWEST, *map(rest, OLDER)], indirect=True, ids=[tools.name for tools in (NEWEST, *OLDER)]
)
# The newest release sees every layout of every part, older ones a selection.
_TURNS = [(NEWEST, turn) for turn in range(ROUNDS)] + [(tools, turn) for tools in OLDER for turn in (1, 4, 6)]
all_turns = pytest.mark.parametrize(
    ("tools", "turn"),
    [one if one in ((NEWEST, 1), (NEWEST, 4)) else rest(*one) for one in _TURNS],
    indirect=["tools"],
    ids=[f"{tools.name}-{turn}" for tools, turn in _TURNS],
)


@pytest.fixture(scope="module")
def tools(request: pytest.FixtureRequest) -> Path:
    wanted: ToolSet = request.param
    try:
        return unpack(wanted)
    except (DownloadFailed, subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"the packages of {wanted.name} cannot be had: {error}")


@pytest.fixture(scope="module")
def gallery(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A GPU of every part, as plain files that `show` replaces."""
    tree = tmp_path_factory.mktemp("sys")
    with tool_room(tools, tree) as room:
        yield Bench(kernel=EmulatedKernel(AMD_PARTS), tree=tree, room=room)


@pytest.fixture
def live(tools: Path, tmp_path: Path) -> Iterator[Bench]:
    """One MI300X whose files can be written: a write changes the machine, or is refused, as the driver would."""
    kernel = EmulatedKernel(["MI300X"])
    with mounted(kernel, tmp_path / "sys") as tree, tool_room(tools, tree) as room:
        yield Bench(kernel=kernel, tree=tree, room=room)


def show(gallery: Bench, turn: int) -> list[Layout]:
    """Every GPU in another layout, and a process on the last partition of the first GPU."""
    kernel = gallery.kernel
    kernel.end_processes()
    devices = SimulatedHardware([(name, 1) for name in AMD_PARTS]).read_devices()
    shown = [device.layouts[turn % len(device.layouts)] for device in devices]
    for number, layout in enumerate(shown):
        kernel.change_gpu(number, compute_mode=layout.compute_mode, memory_mode=layout.memory_mode)
    kernel.add_process(gallery.room.keeper, {(0, len(shown[0].partitions) - 1): HELD_BYTES})
    for old in gallery.tree.iterdir():
        shutil.rmtree(old)
    write_tree(gallery.tree, kernel.tree)
    return shown


def amd_smi(bench: Bench) -> AmdSmi:
    return AmdSmi(Path("amd-smi"), bench.room.run, seconds=120)


@all_turns
def test_amd_smi_reader_and_simulator_agree(gallery: Bench, turn: int) -> None:
    smi = amd_smi(gallery)
    shown, devices = show(gallery, turn), gallery.read()
    with ThreadPoolExecutor() as pool:
        listed, sizes = pool.submit(smi.read_gpus), pool.submit(smi.read_memory)
        told = pool.submit(smi.read_partition_modes)
    rows = iter(zip(listed.result(), sizes.result().values(), strict=True))
    modes = told.result()
    ordinals = iter([node.ordinal for gpu in read_gpus(Sysfs(gallery.tree)) for node in gpu.nodes])
    for gpu, layout, device in zip(gallery.kernel.machine.gpus, shown, devices, strict=True):
        assert device.layout.name == layout.name
        for foretold, partition in zip(layout.partitions, device.layout.partitions, strict=True):
            row, memory = next(rows)
            first = partition.index == 0
            assert row.bdf == gpu.bdf[:-1] + str(partition.index)
            assert row.partition_id == partition.index
            assert row.kfd_id == gpu.gpu_id(partition.index)
            assert f"/dev/dri/{row.render}" == partition.render_node
            # ROCm 7.2 shows the GPU's own id for its first partition, where ROCr goes by KFD's.
            assert row.hip_uuid in {partition.uuid, f"GPU-{gpu.unique_id:016x}" if first else None}
            assert row.hip_id == next(ordinals)
            assert partition.memory_bytes == foretold.memory_bytes
            assert partition.compute_units == foretold.compute_units
            assert memory == (device.memory_bytes if first else partition.memory_bytes) // MIB * MIB
            assert modes[row.gpu] == ((layout.compute_mode, layout.memory_mode) if first else (None, None))
    assert next(rows, None) is None


@with_amd_smi
def test_amd_smi_and_reader_agree_on_processes(gallery: Bench) -> None:
    smi = amd_smi(gallery)
    show(gallery, ROUNDS - 1)
    usage = AmdHardware(Sysfs(gallery.tree)).read_usage()[0]
    found = {(process.pid, process.memory_bytes) for process in smi.read_processes()}
    assert {(process.pid, process.memory_bytes) for process in usage.processes} == found
    assert found == {(gallery.room.keeper, HELD_BYTES)}


@pytest.mark.parametrize(
    "tools",
    [tools if tools == NEWEST else rest(tools) for tools in TOOL_SETS],
    indirect=True,
    ids=[tools.name for tools in TOOL_SETS],
)
@pytest.mark.parametrize("turn", [2, 6])
def test_rocm_smi_and_reader_agree(gallery: Bench, turn: int) -> None:
    show(gallery, turn)
    outcome = gallery.room.run(
        ["rocm-smi", "--showcomputepartition", "--showmemorypartition", "--showmeminfo", "vram", "--json"]
    )
    cards = iter(json.loads(outcome.stdout).values())
    for device in gallery.read():
        for partition in device.layout.partitions:
            card = next(cards)
            first = partition.index == 0
            assert int(card["VRAM Total Memory (B)"]) == (device.memory_bytes if first else partition.memory_bytes)
            assert card.get("Compute Partition") == (device.layout.compute_mode if first else None)
            assert card.get("Memory Partition") == (device.layout.memory_mode if first else None)
    assert next(cards, None) is None


@pytest.mark.parametrize("tools", [NEWEST], indirect=True, ids=lambda tools: tools.name)
def test_changes_through_amd_smi_and_through_the_files_end_alike(live: Bench, tmp_path: Path) -> None:
    """The same contract: every layout, told to AMD's tool or written to the file, is then what had been foretold."""
    reloader = KernelReloader(live.kernel)
    contract.check_every_layout(AmdHardware(Sysfs(live.tree), writer=SmiWriter(amd_smi(live)), reloader=reloader), GPU0)
    other = EmulatedKernel(["MI300X"])
    with mounted(other, tmp_path / "other") as tree:
        contract.check_every_layout(AmdHardware(Sysfs(tree), reloader=KernelReloader(other)), GPU0)
    assert other.machine.gpus == live.kernel.machine.gpus
    assert reloader.reloads >= 2


@pytest.mark.parametrize("tools", [*map(rest, OLDER)], indirect=True, ids=[tools.name for tools in OLDER])
def test_older_tools_change_both_modes_too(live: Bench) -> None:
    hardware = AmdHardware(Sysfs(live.tree), writer=SmiWriter(amd_smi(live)), reloader=KernelReloader(live.kernel))
    for layout in ("CPX/NPS1", "QPX/NPS4"):
        assert hardware.apply_layout(GPU0, layout, reload_driver=True).layout.name == layout
    assert (live.kernel.machine.gpus[0].compute_mode, live.kernel.machine.gpus[0].memory_mode) == ("QPX", "NPS4")


@with_amd_smi
def test_refusals_of_the_tool_are_understood(live: Bench) -> None:
    smi = amd_smi(live)
    hardware = AmdHardware(Sysfs(live.tree), writer=SmiWriter(smi), patience=Patience(tries=1))
    (gpu,) = read_gpus(Sysfs(live.tree))
    with pytest.raises(LayoutNotApplied):
        SmiWriter(smi).set_compute_mode(gpu, "TPX")
    with pytest.raises(LayoutNotApplied):
        SmiWriter(smi).set_memory_mode(gpu, "NPS8")
    live.kernel.add_process(live.room.keeper, {(0, 0): 0})
    with pytest.raises(PartitionBusy, match=f"pid {live.room.keeper} "):
        hardware.apply_layout(GPU0, "CPX")
    assert live.kernel.pending == {}
    assert live.kernel.machine.gpus[0].compute_mode == "SPX"


@with_amd_smi
def test_every_json_that_the_tool_prints_is_found(live: Bench) -> None:
    smi = amd_smi(live)
    for command in (["version"], ["static"], ["partition"], ["monitor", "-v"]):
        assert smi_json.find_json(smi.call(*command, "--json", seconds=120).stdout) is not None, command
