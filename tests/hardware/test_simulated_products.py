import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import SliceProfile
from aimgpu.hardware.simulated import SimulatedHardware, find_product, mig


@pytest.mark.parametrize("name", ["mi300x", "MI300X", "AMD Instinct MI300X", "amd_instinct_mi300x", " MI-300X "])
def test_spellings_of_one_part_are_one_part(name: str) -> None:
    assert find_product(name) is find_product("MI300X")


@pytest.mark.parametrize(
    ("name", "part"), [("NVIDIA H200", "H200-141"), ("h100 80gb hbm3", "H100-80"), ("A100-80GB", "A100-80")]
)
def test_market_names_are_known(name: str, part: str) -> None:
    assert find_product(name).name == part


@pytest.mark.parametrize(
    ("part", "layouts"),
    [
        ("MI300X", "SPX/NPS1 DPX/NPS1 DPX/NPS2 QPX/NPS1 QPX/NPS4 CPX/NPS1 CPX/NPS4"),
        ("MI325X", "SPX/NPS1 DPX/NPS1 QPX/NPS1 QPX/NPS4 CPX/NPS1 CPX/NPS4"),
        ("MI308X", "SPX/NPS1 DPX/NPS1 CPX/NPS1 CPX/NPS4"),
        ("MI300A", "SPX/NPS1 TPX/NPS1 CPX/NPS1"),
        ("MI350P", "SPX/NPS1 DPX/NPS1 CPX/NPS1"),
        ("MI350X", "SPX/NPS1 DPX/NPS1 DPX/NPS2 QPX/NPS1 QPX/NPS2 CPX/NPS1 CPX/NPS2"),
        ("MI355X", "SPX/NPS1 DPX/NPS1 DPX/NPS2 QPX/NPS1 QPX/NPS2 CPX/NPS1 CPX/NPS2"),
    ],
)
def test_layouts_of_amd_parts(part: str, layouts: str) -> None:
    (device,) = SimulatedHardware([(part, 1)]).read_devices()
    assert [layout.name for layout in device.layouts] == layouts.split()
    assert all(sum(p.compute_units or 0 for p in layout.partitions) == device.compute_units for layout in device.layouts)


def test_the_usual_mig_profiles_give_the_nineteen_full_layouts_that_nvidia_draws() -> None:
    usual = tuple(p for p in find_product("A100-80").mig if p.kind != "1g.20gb")
    assert len(mig.full_placements(usual)) == 19


def test_full_mig_layouts_are_legal_and_distinct() -> None:
    for part in ("A100-80", "H100-80", "H200-141"):
        found = mig.full_placements(find_product(part).mig)
        for placements in found:
            name = "+".join(f"{profile.kind}@{start}" for profile, start in placements)
            assert mig.parse_placements(name, find_product(part).mig) == placements
        assert len({frozenset(placements) for placements in found}) == len(found)


_PROFILES = find_product("H200-141").mig


@given(st.lists(st.tuples(st.sampled_from(_PROFILES), st.integers(0, 7)), max_size=8))
def test_a_set_of_placements_is_legal_only_within_slices_counts_and_starts(chosen: list[tuple[SliceProfile, int]]) -> None:
    if mig.parse_placements("+".join(f"{profile.kind}@{start}" for profile, start in chosen), _PROFILES) is None:
        return
    slices = [slice_ for profile, start in chosen for slice_ in range(start, start + profile.memory_slices)]
    assert len(slices) == len(set(slices))
    assert all(slice_ < 8 for slice_ in slices)
    assert sum(profile.compute_slices for profile, _ in chosen) <= 7
    assert all(start in profile.starts for profile, start in chosen)
    assert sum(profile.kind.endswith("+me") for profile, _ in chosen) <= 1


def test_names_of_mig_layouts_are_read_back() -> None:
    parsed = mig.parse_placements("3g.71gb@4+1g.18gb+me@0+1g.18gb@1", _PROFILES)
    assert parsed is not None
    assert mig.mig_layout("gpu", parsed, {}).name == "1g.18gb+me@0+1g.18gb@1+3g.71gb@4"


@pytest.mark.parametrize("text", ["", "1g.18gb@7", "3g.71gb@1", "4g.71gb@0+4g.71gb@0", "1g.5gb@0", "3g.71gb@0,3g.71gb@4"])
def test_names_that_are_no_legal_mig_layout_are_not_read(text: str) -> None:
    assert mig.parse_placements(text, _PROFILES) is None
