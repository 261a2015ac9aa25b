"""Whatever breaks: what is wanted and possible runs, what is charged has an owner, and nothing waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.put_back import PUT_BACK
from tests.simulation.schedules import run_schedule

SECONDS = os.environ.get("AIMGPU_SIMULATION_SECONDS", "20")
COUNT = os.environ.get("AIMGPU_SIMULATION_COUNT", "400")
FIRST = os.environ.get("AIMGPU_SIMULATION_FIRST", "1")
MOST_SEEDS = 100


def test_after_any_schedule_of_operations_and_faults_all_is_as_it_should_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--first", FIRST, "--count", COUNT, "--seconds", SECONDS],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"`python -m tests.simulation --show SEED` shows one of these:\n{done.stdout}{done.stderr}"
    assert " 0 failed" in done.stdout


def test_one_seed_gives_one_run() -> None:
    first, second = run_schedule(11), run_schedule(11)
    assert first.steps == second.steps > 0
    assert (first.trace, first.log) == (second.trace, second.log)


@pytest.mark.rest
@pytest.mark.parametrize("fault", PUT_BACK)
def test_a_fault_that_is_put_back_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PUT_BACK[fault](monkeypatch)
    assert any(run_schedule(seed).problem is not None for seed in range(1, MOST_SEEDS))
