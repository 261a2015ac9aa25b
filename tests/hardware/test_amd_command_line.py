"""The command line on a machine with AMD GPUs, as its owner uses it: emulated ones whose files switch modes, as /sys."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.hardware.emulation.fuse import mounted
from tests.hardware.emulation.kernel import EmulatedKernel
from tests.hardware.emulation.namespace import aimgpu_on
from tests.hardware.emulation.sysfs_tree import pci_path
from tests.hardware.emulation.tools import why_not

from aimgpu.errors import DriverReloadNeeded, PartitionBusy, UnknownLayout
from aimgpu.hardware.simulated import find_product

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    kernel: EmulatedKernel
    tree: Path
    home: Path

    def aimgpu(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return aimgpu_on(self.tree, self.home, *arguments)

    def read(self, *arguments: str) -> Any:
        outcome = self.aimgpu(*arguments, "--json")
        assert outcome.returncode == 0, outcome
        return json.loads(outcome.stdout)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    kernel = EmulatedKernel(["MI300X", "MI350X"])
    kernel.change_gpu(1, compute_mode="DPX")
    with mounted(kernel, tmp_path / "sys") as tree:
        yield Box(kernel=kernel, tree=tree, home=tmp_path / "home")


def test_gpus_are_shown_divided_and_protected_from_what_would_break_others(box: Box) -> None:
    seen = box.read("gpus")
    assert seen["simulated"] is False
    assert [(gpu["product"], gpu["layout"], len(gpu["partitions"])) for gpu in seen["gpus"]] == [
        ("MI300X", "SPX/NPS1", 1),
        ("MI350X", "DPX/NPS1", 2),
    ]
    assert seen["gpus"][0]["partitions"][0]["measured_bytes"] == seen["gpus"][0]["measured_bytes"] == 297 << 20
    changed = box.read("partition", "apply", "0", "CPX")
    assert (changed["before"], changed["after"]) == ("SPX/NPS1", "CPX/NPS1")
    assert [gpu.compute_mode for gpu in box.kernel.machine.gpus] == ["CPX", "DPX"]

    box.kernel.add_process(os.getpid(), {(0, 3): 5 << 30, (1, 0): 0})
    fourth = box.read("gpus")["gpus"][0]["partitions"][3]
    assert fourth["foreign_bytes"] == 5 << 30
    assert fourth["free_bytes"] == fourth["memory_bytes"] - (5 << 30)
    busy = box.aimgpu("partition", "reset", "0")
    assert busy.returncode == PartitionBusy.exit_status
    assert f"pid {os.getpid()} ({own_name()})" in busy.stderr
    reload = box.aimgpu("partition", "apply", "1", "CPX/NPS2")
    assert reload.returncode == DriverReloadNeeded.exit_status
    assert "--reload-driver" in reload.stderr
    assert box.kernel.pending == {}
    assert [gpu.compute_mode for gpu in box.kernel.machine.gpus] == ["CPX", "DPX"]


def test_a_virtual_function_says_why_it_offers_so_little(box: Box) -> None:
    box.kernel.change_gpu(0, product=replace(find_product("MI300X"), pci_device=0x74B5))
    box.kernel.tree[f"{pci_path(box.kernel.machine.gpus[0])}/available_compute_partition"] = "SPX\n"
    outcome = box.aimgpu("partition", "apply", "0", "CPX")
    assert outcome.returncode == UnknownLayout.exit_status
    assert "virtual function" in outcome.stderr
    assert "Partition the GPU on the host." in outcome.stderr


def test_verifying_changes_modes_only_when_asked_and_restores_them(box: Box, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    box.aimgpu("doctor", "--verify", "--report", str(report))
    assert box.kernel.writes == []
    assert json.loads(report.read_text())["changed_layouts"] is False
    box.aimgpu("doctor", "--verify", "--change-layouts", "--report", str(report))
    found = json.loads(report.read_text())
    tried = {(trial["gpu"], trial["what"]): trial["outcome"] for trial in found["trials"]}
    modes = {(gpu, what): outcome for (gpu, what), outcome in tried.items() if what.startswith("mode ")}
    assert set(modes) == {
        *(("gpu0", f"mode {mode}/NPS1") for mode in ("DPX", "QPX", "CPX")),
        *(("gpu1", f"mode {mode}/NPS1") for mode in ("SPX", "QPX", "CPX")),
    }
    assert {*modes.values(), tried["gpu0", "restored"], tried["gpu1", "restored"]} == {"passed"}
    assert [gpu.compute_mode for gpu in box.kernel.machine.gpus] == ["SPX", "DPX"]
    assert {"current_compute_partition"} == {name for name, _ in box.kernel.writes}


def own_name() -> str:
    return Path("/proc/self/comm").read_text().strip()
