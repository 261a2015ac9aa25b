"""The region's protocol as a Spin model (native/model/region.pml): every order of steps, within bounds."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from aimgpu.isolation import building

MODEL = building.find_sources() / "model" / "region.pml"
BOUNDS = {
    "allocations": ("-DDEVICES=1", "-DOPERATIONS=2"),
    "contexts": ("-DDEVICES=1", "-DOPERATIONS=2", "-DCONTEXT=1", "-DMOST_CAP=3"),
}


def explore(folder: Path, model: str, *bounds: str) -> str:
    for program in ("spin", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    (folder / "region.pml").write_text(model)
    compiler = ("gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c")
    for command in (("spin", "-a", *bounds, "region.pml"), compiler):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return subprocess.run(("./pan", "-m20000", "-w24"), cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("bounds", BOUNDS)
def test_no_order_of_steps_passes_the_cap_keeps_a_dead_charge_or_stops(tmp_path: Path, bounds: str) -> None:
    said = explore(tmp_path, MODEL.read_text(), *BOUNDS[bounds])
    assert "errors: 0" in said, said
    assert "not completed" not in said, said
    found = re.search(r"(\d+) states, stored", said)
    assert found is not None
    assert int(found[1]) > 1_000_000
