"""The benchmark that runs any preloadable shim beside ours: it sees what a shim does."""

import subprocess
from pathlib import Path

import pytest
from benchmarks.interposer import run

from aimgpu.isolation import building

BY_TEXT = {case.what: case for case in run.CASES_OF_ALL}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    run.build(folder)
    return folder


@pytest.mark.parametrize("kind", ["plain memory", "arrays", "exported, let go and imported again"])
def test_without_a_shim_a_program_takes_all_and_with_ours_its_cap(tools: Path, kind: str) -> None:
    case = BY_TEXT[f"held: one process, {kind}"]
    assert run.measure(case, run.Shim(name="none"), tools) == 400
    assert run.measure(case, run.Shim(name="ours", path=building.find_interposer(), is_ours=True), tools) == 100


def test_a_shim_that_ends_its_program_is_a_figure(tools: Path, tmp_path: Path) -> None:
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text("#include <stdlib.h>\nint cuInit(unsigned flags) { abort(); return (int)flags; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source)], check=True)
    assert run.measure(BY_TEXT["one launch"], run.Shim(name="it", path=shim), tools) == "ends by signal 6"


def test_a_shim_is_told_its_limits_as_the_command_says(tools: Path, tmp_path: Path) -> None:
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(
        "#include <stdlib.h>\n#include <string.h>\n"
        'int cuInit(unsigned flags) { return strcmp(getenv("LIMIT"), "1024m") == 0 ? (int)flags : 1; }\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source)], check=True)
    case = BY_TEXT["held: one process, plain memory"]
    assert run.measure(case, run.Shim(name="it", path=shim, settings=("LIMIT={mib}m",)), tools) == 400
    assert run.measure(case, run.Shim(name="it", path=shim, settings=("LIMIT={percent}m",)), tools) == "ends with 4"
