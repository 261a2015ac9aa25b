import pytest

from aimgpu.hardware.amd import modes
from aimgpu.hardware.simulated import find_product


@pytest.mark.parametrize(
    ("part", "compute", "memory", "sizes"),
    [
        ("MI300X", "SPX", "NPS1", [206141652992]),
        ("MI300X", "DPX", "NPS1", [103070826496] * 2),
        ("MI300X", "DPX", "NPS2", [103079215104, 103062437888]),
        ("MI300X", "QPX", "NPS1", [51535413248] * 4),
        ("MI300X", "QPX", "NPS4", [51539607552] * 3 + [51522830336]),
        ("MI300X", "CPX", "NPS1", [25767706624] * 8),
        ("MI300X", "CPX", "NPS4", [25769803776] * 6 + [25761415168] * 2),
        ("MI325X", "CPX", "NPS1", [34357641216] * 8),
        ("MI325X", "CPX", "NPS4", [34359738368] * 6 + [34351349760] * 2),
        ("MI355X", "DPX", "NPS2", [154618822656, 154602045440]),
        ("MI350X", "QPX", "NPS2", [77309411328] * 2 + [77301022720] * 2),
        ("MI350X", "CPX", "NPS2", [38654705664] * 4 + [38650511360] * 4),
        ("MI308X", "CPX", "NPS4", [51539607552] * 3 + [51522830336]),  # these four were read on real devices
        ("MI308X", "CPX", "NPS1", [51535413248] * 4),
    ],
)
def test_partition_bytes_are_those_of_the_driver(part: str, compute: str, memory: str, sizes: list[int]) -> None:
    chip = find_product(part).chip
    assert chip is not None
    assert modes.partition_bytes(compute, memory, chip) == tuple(sizes)


@pytest.mark.parametrize(
    ("xccs", "names"),
    [(8, "SPX DPX QPX CPX"), (6, "SPX TPX CPX"), (4, "SPX DPX CPX"), (2, "SPX CPX"), (1, "SPX CPX")],
)
def test_compute_modes_follow_the_number_of_dies(xccs: int, names: str) -> None:
    assert modes.compute_modes(xccs) == tuple(names.split())


def test_memory_modes_go_with_compute_modes_as_the_kernel_says() -> None:
    gfx942, gfx950 = 90402, 90500
    assert not modes.are_compatible("SPX", "NPS4", gfx942)
    assert modes.are_compatible("CPX", "NPS4", gfx942)
    assert not modes.are_compatible("CPX", "NPS2", gfx942)
    assert modes.are_compatible("CPX", "NPS2", gfx950)
    assert not modes.are_compatible("CPX", "NPS8", gfx950)
    assert not modes.are_compatible("CPX", "UNKNOWN", gfx950)


@pytest.mark.parametrize(("memory", "compute"), [("NPS1", "SPX"), ("NPS2", "DPX"), ("NPS4", "CPX")])
def test_the_driver_chooses_a_compute_mode_when_it_is_loaded(memory: str, compute: str) -> None:
    chip = find_product("MI300X").chip
    assert chip is not None
    assert modes.mode_after_reload(memory, chip) == compute


def test_a_mode_that_the_rules_do_not_know_has_no_predicted_layout() -> None:
    chip = find_product("MI355X").chip
    assert chip is not None
    assert modes.predict_layout("gpu", "OPX", "NPS1", chip) is None
    assert modes.predict_layout("gpu", "CPX", "NPSX", chip) is None


def test_a_compute_mode_alone_keeps_the_memory_mode() -> None:
    assert modes.wanted_modes("cpx", "NPS4") == ("CPX", "NPS4")
    assert modes.wanted_modes(" CPX/nps1", "NPS4") == ("CPX", "NPS1")
