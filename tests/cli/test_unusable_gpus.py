"""A GPU on which no program can run is neither free nor planned on, and commands say so alike.

The kernel does not have the compute driver (KFD), or this is a container that did not get its device file.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel
from tests.hardware.emulation.namespace import COMPUTE_DRIVER, aimgpu_on
from tests.hardware.emulation.sysfs_tree import write_tree
from tools import record_device

from aimgpu.errors import PlacementRefused
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.amd.recording import RecordedSysfs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting another /sys needs root")
STACK = "models: {chat: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, gpu: {memory: 9GiB}}}\n"


@dataclass(frozen=True)
class Box:
    tree: Path
    folder: Path
    device_files: tuple[str, ...]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return aimgpu_on(self.tree, self.folder / "home", *arguments, device_files=self.device_files)

    def read(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)


@pytest.fixture(scope="module", params=["no compute driver", "no device file", "usable"])
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Box:
    folder = tmp_path_factory.mktemp("box")
    write_tree(folder / "sys", EmulatedKernel(["MI300X"]).tree)
    (folder / "stack.yaml").write_text(STACK)
    if request.param == "no compute driver":
        shutil.rmtree(folder / "sys/class/kfd")
    files = () if request.param == "no device file" else COMPUTE_DRIVER
    return Box(folder / "sys", folder, files)


@pytest.fixture(scope="module")
def usable(box: Box) -> bool:
    return bool(box.device_files) and (box.tree / "class/kfd").exists()


@pytest.fixture(scope="module")
def report(box: Box) -> Path:
    """Of `doctor --verify`."""
    path = box.folder / "report.json"
    outcome = box.run("doctor", "--verify", "--report", str(path))
    assert "Traceback" not in outcome.stderr
    return path


def test_gpus_shows_memory_as_free_only_where_a_model_could_run(box: Box, *, usable: bool) -> None:
    (gpu,) = box.read("gpus")["gpus"]
    assert [partition["free_bytes"] > 0 for partition in gpu["partitions"]] == ([True] if usable else [])
    if not usable:
        assert "no model can run" in box.run("gpus").stdout


@pytest.mark.parametrize("command", [("plan",), ("up", "--dry-run")])
def test_no_plan_uses_it(box: Box, command: tuple[str, ...], *, usable: bool) -> None:
    outcome = box.run(command[0], "-f", str(box.folder / "stack.yaml"), *command[1:])
    shown = outcome.stdout + outcome.stderr
    assert outcome.returncode == (0 if usable else PlacementRefused.exit_status), shown
    assert ("has no partition that a model could run on" in shown) is not usable


def test_verifying_it_ends_with_a_report(report: Path, *, usable: bool) -> None:
    written = json.loads(report.read_text())
    assert written["real"]
    found = {trial["what"]: trial for trial in written["trials"]}
    assert found["reading"]["outcome"] == "passed"
    assert ("no partition that a program could run on" in found["memory cap"]["text"]) is not usable
    assert "failed" not in [trial["outcome"] for trial in written["trials"]] or not usable


def test_a_report_that_was_sent_in_becomes_a_recording(report: Path, tmp_path: Path, *, usable: bool) -> None:
    """What its GPUs answered can be played back; one with something that failed is no evidence."""
    if not usable:
        with pytest.raises(SystemExit, match="no evidence: failed were finding"):
            record_device.main([str(tmp_path), "--report", str(report)])
        return
    assert record_device.main([str(tmp_path), "--report", str(report)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert path.name == "amd-instinct-mi300x.json"
    (device,) = AmdHardware(RecordedSysfs(json.loads(path.read_text())["files"])).read_devices()
    assert (device.product, device.layout.name, device.compute_units) == ("MI300X", "SPX/NPS1", 304)
    simulated = tmp_path / "simulated.json"
    simulated.write_text(json.dumps({**json.loads(report.read_text()), "real": False}))
    with pytest.raises(SystemExit, match="simulation"):
        record_device.main([str(tmp_path), "--report", str(simulated)])
