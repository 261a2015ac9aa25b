"""Every product in every pair of modes: what the tables say adds up to the GPU, and each layout leads to every other."""

from fractions import Fraction as Ratio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import Device, Layout, Vendor
from aimgpu.domain.compute import granted_compute, partition_part, partition_ppm, whole_units
from aimgpu.errors import UnknownLayout, UnknownProduct
from aimgpu.hardware.amd import modes, products
from aimgpu.hardware.amd.modes import PAGE_BYTES, RESERVED_BYTES, Chip
from aimgpu.hardware.simulated import SimulatedHardware, find_product, known_products
from aimgpu.hardware.simulated.products import Product
from aimgpu.units import PPM

AMD = [part for part in known_products() if part.chip is not None]
NVIDIA = [part for part in known_products() if part.mig]
COMPUTE = ("SPX", "DPX", "TPX", "QPX", "CPX")
MEMORY = ("NPS1", "NPS2", "NPS4", "NPS8")
PAIRS = [(part, compute, memory) for part in AMD for compute in COMPUTE for memory in MEMORY]


def device_of(part: Product) -> Device:
    return SimulatedHardware([(part.name, 1)]).read_devices()[0]


def chip_of(part: Product) -> Chip:
    assert part.chip is not None
    return part.chip


def is_offered(part: Product, compute: str, memory: str) -> bool:
    chip = chip_of(part)
    return (
        compute in modes.compute_modes(chip.xccs)
        and memory in part.memory_modes
        and modes.are_compatible(compute, memory, chip.gfx_target)
    )


def named(value: object) -> str | None:
    return value.name if isinstance(value, Product) else None


@pytest.mark.parametrize(("part", "compute", "memory"), PAIRS, ids=named)
def test_a_pair_of_modes_is_offered_with_all_of_the_gpu_or_refused_with_what_is_offered(
    part: Product, compute: str, memory: str
) -> None:
    hardware, device = SimulatedHardware([(part.name, 1)]), device_of(part)
    names = [layout.name for layout in device.layouts]
    if not is_offered(part, compute, memory):
        assert f"{compute}/{memory}" not in names
        with pytest.raises(UnknownLayout) as caught:
            hardware.apply_layout(device.id, f"{compute}/{memory}", reload_driver=True)
        assert names[0] in str(caught.value.hint)
        assert hardware.read_devices()[0].layout == device.layout
        return
    layout = hardware.apply_layout(device.id, f"{compute.lower()}/{memory.lower()}", reload_driver=True).layout
    assert (layout.compute_mode, layout.memory_mode) == (compute, memory)
    check_layout(layout, part)


def check_layout(layout: Layout, part: Product) -> None:
    """All dies are given away once, all memory but the driver's reserve and the odd page, evenly within a memory range."""
    chip, sizes = chip_of(part), [partition.memory_bytes for partition in layout.partitions]
    assert sum(partition.compute_units or 0 for partition in layout.partitions) == part.compute_units
    assert len({partition.compute_units for partition in layout.partitions}) == 1
    ranges = modes.memory_ranges(layout.memory_mode or "")
    assert ranges is not None
    assert 0 <= chip.memory_bytes - sum(sizes) < len(sizes) * PAGE_BYTES * 2
    assert all(size % PAGE_BYTES == 0 for size in sizes)
    sharers = len(sizes) // ranges
    for first in range(0, len(sizes), sharers):
        assert len(set(sizes[first : first + sharers])) == 1
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] - sizes[-1]) * sharers <= RESERVED_BYTES
    assert [partition.index for partition in layout.partitions] == list(range(len(sizes)))
    assert {partition.kind for partition in layout.partitions} == {str(layout.compute_mode).lower()}


@pytest.mark.parametrize("part", AMD, ids=named)
def test_every_layout_leads_to_every_other_and_back(part: Product) -> None:
    hardware, device = SimulatedHardware([(part.name, 1)]), device_of(part)
    for first in device.layouts:
        for second in device.layouts:
            for layout in (first, second):
                assert hardware.apply_layout(device.id, layout.name, reload_driver=True).layout == layout


@pytest.mark.parametrize("part", AMD, ids=named)
@pytest.mark.parametrize("memory", MEMORY)
def test_what_the_driver_chooses_when_it_is_loaded_is_a_layout_of_the_gpu(part: Product, memory: str) -> None:
    if memory not in part.memory_modes:
        return
    compute = modes.mode_after_reload(memory, chip_of(part))
    assert is_offered(part, compute, memory)


@pytest.mark.parametrize("part", AMD, ids=named)
def test_a_gpu_is_known_by_the_modes_that_it_lists_where_no_other_lists_the_same(part: Product) -> None:
    listed = modes.compute_modes(chip_of(part).xccs)
    assert modes.xccs_of(listed) == chip_of(part).xccs
    assert modes.xccs_of(listed[:-1]) is None
    assert modes.xccs_of((*listed, "OPX")) is None


@pytest.mark.parametrize("text", ["NPS", "NPS0", "NPS-1", "NPS1.5", "nps1", "4", "", "NPS1 ", "NPS4444", "NPS" + "9" * 5000])
def test_what_is_no_memory_mode_has_no_ranges(text: str) -> None:
    assert modes.memory_ranges(text) is None
    assert not modes.are_compatible("CPX", text, 90402)


@pytest.mark.parametrize("xccs", [0, -1, 65, 4_294_967_295])
def test_a_damaged_number_of_dies_is_not_as_many_partitions(xccs: int) -> None:
    chip = Chip(xccs=xccs, compute_units_each=38, memory_bytes=1 << 37, gfx_target=90402)
    assert modes.partition_count("CPX", xccs) is None
    assert modes.predict_layout("gpu", "CPX", "NPS1", chip) is None


# --- names ---


@pytest.mark.parametrize("pci_device", sorted({*products._PRODUCTS, *products._VIRTUAL_FUNCTIONS}))
def test_a_pci_id_has_one_name_whether_the_gpu_is_real_or_virtual(pci_device: int) -> None:
    name = products.product_name(pci_device, 90402)
    assert name.startswith("MI")
    assert products.market_name(pci_device) == f"AMD Instinct {name}"
    assert products.is_virtual_function(pci_device) == (pci_device not in products._PRODUCTS)


def test_no_pci_id_is_both_a_gpu_and_a_part_of_one() -> None:
    assert not products._PRODUCTS.keys() & products._VIRTUAL_FUNCTIONS.keys()
    assert set(products._VIRTUAL_FUNCTIONS.values()) <= set(products._PRODUCTS.values())


@pytest.mark.parametrize("part", AMD, ids=named)
def test_a_simulated_gpu_has_the_pci_id_of_its_name(part: Product) -> None:
    assert part.pci_device is not None
    assert products.product_name(part.pci_device, chip_of(part).gfx_target) == part.name


@pytest.mark.parametrize(
    ("target", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100"), (0, "amd")]
)
def test_an_architecture_is_named_as_compilers_name_it(target: int, name: str) -> None:
    assert products.gfx_name(target) == name
    assert products.product_name(0x7FFF, target) == f"{name}-7fff"
    assert products.market_name(0x7FFF) is None


@pytest.mark.parametrize("part", known_products(), ids=named)
def test_a_product_is_found_under_every_name_of_it_in_any_case(part: Product) -> None:
    for name in (part.name, part.market_name, *part.aliases):
        for spelling in (name, name.upper(), name.lower(), f"  {name} ", name.replace("-", " "), name.replace(" ", "_")):
            assert find_product(spelling) is part


@pytest.mark.parametrize("name", ["", " ", "MI", "MI300", "AMD", "Instinct", "H100-94", "\x00", "MI300X; rm", "M" * 10_000])
def test_a_name_of_no_product_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UnknownProduct) as caught:
        find_product(name)
    for part in known_products():
        assert part.name in str(caught.value.hint)


# --- MIG ---


@pytest.mark.parametrize("part", NVIDIA, ids=named)
def test_every_listed_mig_layout_fits_the_gpu_and_can_be_had(part: Product) -> None:
    hardware, device = SimulatedHardware([(part.name, 1)]), device_of(part)
    assert device.vendor is Vendor.NVIDIA
    for layout in device.layouts:
        assert layout.memory_bytes <= part.memory_bytes
        assert sum(partition.compute_units or 0 for partition in layout.partitions) <= part.compute_units
        assert hardware.apply_layout(device.id, layout.name).layout == layout
    largest = max(part.mig, key=lambda profile: profile.memory_slices)
    assert largest.compute_units <= part.compute_units


@pytest.mark.parametrize("part", NVIDIA, ids=named)
def test_every_profile_of_a_gpu_can_be_had_alone_at_each_of_its_starts(part: Product) -> None:
    hardware, device = SimulatedHardware([(part.name, 1)]), device_of(part)
    for profile in part.mig:
        for start in profile.starts:
            made = hardware.apply_layout(device.id, f"{profile.kind}@{start}").layout
            assert [(one.kind, one.start, one.memory_bytes) for one in made.partitions] == [
                (profile.kind, start, profile.memory_bytes)
            ]
        for start in {*range(9)} - set(profile.starts):
            with pytest.raises(UnknownLayout):
                hardware.apply_layout(device.id, f"{profile.kind}@{start}")


# --- compute of a partition and of its GPU ---

ALL_LAYOUTS = [(device, layout) for part in AMD for device in [device_of(part)] for layout in device.layouts]


@pytest.mark.parametrize(("device", "layout"), ALL_LAYOUTS, ids=lambda value: getattr(value, "id", None))
def test_the_parts_of_a_layout_are_the_whole_gpu(device: Device, layout: Layout) -> None:
    parts = [partition_part(device, partition) for partition in layout.partitions]
    assert sum(part for part in parts if part is not None) == Ratio(1)
    assert len(set(parts)) == 1


@given(pair=st.sampled_from(ALL_LAYOUTS), ppm=st.integers(1, PPM))
def test_a_share_of_the_gpu_comes_back_from_its_partition_within_one_unit(pair: tuple[Device, Layout], ppm: int) -> None:
    device, layout = pair
    partition = layout.partitions[0]
    part = partition_part(device, partition)
    assert part is not None
    assert partition.compute_units is not None
    assert device.compute_units is not None
    here = partition_ppm(ppm, part)
    assert (here is None) == (ppm > part * PPM)
    if here is None:
        return
    found = granted_compute(here, device, partition)
    assert found is not None
    assert abs(found.device_ppm - ppm) <= 1
    assert found.units == whole_units(here, partition.compute_units)
    assert abs((found.units or 0) - Ratio(ppm * device.compute_units, PPM)) <= 1
    assert found.device_units == device.compute_units
