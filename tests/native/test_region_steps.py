"""What the C does to a region is what the model allows: recorded step by step, and replayed. Eleven changes are noticed."""

import shutil
from pathlib import Path

import pytest
from tests.native import region_steps

from aimgpu.isolation import building

RECORDINGS = 24

# A text of a file of native/, what it is replaced by.
CHANGES = {
    "a refused charge is not taken back": (
        "account.c",
        "    uncharge(share, share->slot, bytes);\n    return 0;",
        "    return 0;",
    ),
    "no second sum after a charge": (
        "account.c",
        "    charge(share, share->slot, bytes);\n    *sum = total(tenant);\n    if (*sum <= cap_of(tenant))\n        return 1;",
        "    charge(share, share->slot, bytes);\n    return 1;",
    ),
    "without the lock as far as the cap": (
        "account.c",
        "plus(sum, bytes) > cap - cap / 8)\n        return",
        "0)\n        return",
    ),
    "the first place is not summed": (
        "account.c",
        "for (uint32_t i = 0; i < aim_processes(tenant); i++)\n",
        "for (uint32_t i = 1; i < aim_processes(tenant); i++)\n",
    ),
    "contexts are not summed": (
        "account.c",
        "return plus(__atomic_load_n(&process->used_bytes, __ATOMIC_SEQ_CST), load(&process->context_bytes));",
        "return __atomic_load_n(&process->used_bytes, __ATOMIC_SEQ_CST);",
    ),
    "a place is freed without its lock for life": (
        "account.c",
        " || !STEP(S_SEIZE, i, aim_life_seize(share, process, 1)))",
        ")",
    ),
    "a place is claimed before its lock for life is taken": (
        "account.c",
        "!STEP(S_LIFE, i, aim_life_take(share, process)) ||\n            !STEP(S_CLAIM, i, claim(process)))",
        "!STEP(S_CLAIM, i, claim(process)) ||\n            !STEP(S_LIFE, i, aim_life_take(share, process)))",
    ),
    "a place is active before it is charged": (
        "account.c",
        "    STEP(S_SET_USED,",
        "    STEP(S_ACTIVATE, place(share, slot), (store(&slot->state, AIM_ACTIVE), 0));\n    STEP(S_SET_USED,",
    ),
    "dead processes keep their places where none is left": (
        "account.c",
        "        reap(share, *how);\n        slot = claim_slot(share);",
        "        slot = claim_slot(share);",
    ),
    "a former self is forgotten without the lock": (
        "account.c",
        "if (*how == AIM_LOCKED && STEP(S_FORMER,",
        "if (STEP(S_FORMER,",
    ),
    "the lock of a tenant is not given back": (
        "lock.c",
        "    if (how == AIM_LOCKED)\n",
        "    if (how == AIM_NO_FILE)\n",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    for program in ("spin", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    folder = tmp_path_factory.mktemp("models")
    return region_steps.compile_model(folder, context=0), region_steps.compile_model(folder, context=1)


def verdicts(folder: Path, models: tuple[Path, Path], sources: Path, count: int) -> list[region_steps.Verdict]:
    """Of recordings with and without contexts in turns, as far as the first that does not fit."""
    program = region_steps.compile_program(folder / "region_steps", sources)
    found: list[region_steps.Verdict] = []
    for seed in range(count):
        recording = region_steps.record(folder, program, seed, context=seed % 2)
        found.append(region_steps.replay(models[seed % 2], recording))
        if not found[-1].is_accepted:
            break
    return found


def test_the_model_accepts_what_the_c_does(tmp_path: Path, models: tuple[Path, Path]) -> None:
    found = verdicts(tmp_path, models, building.find_sources(), RECORDINGS)
    assert found == [region_steps.Verdict(is_accepted=True, broken=())] * RECORDINGS


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_c_is_noticed(tmp_path: Path, models: tuple[Path, Path], change: str) -> None:
    name, text, other = CHANGES[change]
    sources = tmp_path / "native"
    shutil.copytree(building.find_sources(), sources)
    before = (sources / name).read_text()
    assert before.count(text) == 1
    (sources / name).write_text(before.replace(text, other))
    assert not verdicts(tmp_path, models, sources, RECORDINGS)[-1].is_accepted
