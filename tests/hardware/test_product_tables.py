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
from aimgpu.hardware.known_gpus import SOURCES, known_gpus
from aimgpu.hardware.simulated import SimulatedHardware, find_product, known_products
from aimgpu.hardware.simulated.products import Product
from aimgpu.units import GIB, PPM

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


@pytest.mark.parametrize(
    ("pci_device", "name"),
    [(0x74A1, "MI300X"), (0x74B5, "MI300X"), (0x74A9, "MI300X"), (0x74BC, "MI308X"), (0x740F, "MI210"), (0x7410, "MI210")],
)
def test_a_pci_id_has_one_name_whether_the_gpu_is_real_or_virtual(pci_device: int, name: str) -> None:
    assert products.product_name(pci_device, 90402) == name
    assert products.market_name(pci_device) == f"AMD Instinct {name}"


@pytest.mark.parametrize(
    ("pci_device", "units", "gib", "name"),
    [
        (0x744C, 96, 23.98, "RX-7900-XTX"),
        (0x744C, 84, 19.98, "RX-7900-XT"),
        (0x744C, 80, 15.98, "RX-7900-GRE"),
        (0x744C, 70, 15.98, "gfx1100-744c"),  # none that is known has so many
        (0x7480, 32, 15.98, "RX-7600-XT"),
        (0x7480, 32, 7.98, "RX-7600"),
        (0x7590, 32, 7.95, "RX-9060-XT-8"),
        (0x1586, 40, 96, "8060S-96"),
        (0x1586, 40, 62, "8060S-64"),
        (0x740C, 104, 63.98, "MI250"),
        (0x740C, 110, 63.98, "MI250X"),
        (0x74A1, 38, 191.98, "MI300X"),  # one partition of eight is seen
    ],
)
def test_cards_that_share_a_pci_id_are_told_apart_by_their_units_and_memory(
    pci_device: int, units: int, gib: float, name: str
) -> None:
    assert products.product_name(pci_device, 110000, units, round(gib * GIB)) == name


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
    namesakes = [other for other in known_products() if other.market_name == part.market_name]
    for name in (part.name, part.market_name)[: 1 if len(namesakes) > 1 else 2]:
        for spelling in (name, name.upper(), name.lower(), f"  {name} ", name.replace("-", " "), name.replace(" ", "_")):
            assert find_product(spelling) is part


@pytest.mark.parametrize(
    ("typed", "product"),
    [
        ("RTX 4090", "RTX-4090-24"),
        ("rtx4090", "RTX-4090-24"),
        ("4090", "RTX-4090-24"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX-4070-Laptop-8"),
        ("4070 mobile", "RTX-4070-Laptop-8"),
        ("4060 Ti 16GB", "RTX-4060-Ti-16"),
        ("RTX 5090 32 GB", "RTX-5090-32"),
        ("7900xtx", "RX-7900-XTX"),
        ("Radeon RX 9070 XT", "RX-9070-XT"),
        ("Strix Halo", "8060S-96"),
        ("Ryzen AI Max+ 395", "8060S-96"),
        ("RTX 6000 Ada", "RTX-6000-Ada-48"),
        ("RTX PRO 6000", "RTX-PRO-6000-96"),
        ("a100 80gb", "A100-80"),
        ("H100-80GB", "H100-80"),
        ("NVIDIA L40S", "L40S-48"),
        ("T4", "T4-16"),
        ("MI250", "MI250"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(typed: str, product: str) -> None:
    assert find_product(typed).name == product


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("RTX 4O90", "RTX-4090-24"),
        ("MI300", "MI300X"),
        ("RTX 4060 Ti", "RTX-4060-Ti-16"),
        ("A100", "A100-40"),
        ("7900 xxt", "RX-7900-XT"),
        ("GTX 1080", "RTX-3060-12"),  # none is like it
    ],
)
def test_a_name_that_is_no_single_gpu_is_answered_with_one_that_is(typed: str, meant: str) -> None:
    with pytest.raises(UnknownProduct) as caught:
        find_product(typed)
    assert meant in str(caught.value.hint)
    assert find_product(meant).name == meant


@pytest.mark.parametrize("name", ["", " ", "MI", "AMD", "Instinct", "H100-94", "\x00", "MI300X; rm", "M" * 10_000, "rtx" * 999])
def test_a_name_of_no_product_is_refused_with_where_they_are_listed(name: str) -> None:
    with pytest.raises(UnknownProduct) as caught:
        find_product(name)
    assert "aimgpu gpus --known" in str(caught.value.hint)
    assert len(caught.value.message) < 200


def test_every_figure_has_a_source_that_is_explained() -> None:
    assert {gpu.source for gpu in known_gpus()} == SOURCES.keys()
    for gpu in known_gpus():
        assert gpu.compute_units > 0
        assert gpu.memory_bytes > 4 * GIB


@pytest.mark.parametrize("part", [part for part in known_products() if not part.chip and not part.mig], ids=named)
def test_a_gpu_that_cannot_be_divided_is_one_partition_with_all_of_it(part: Product) -> None:
    hardware = SimulatedHardware([(part.name, 1)])
    (device,) = hardware.read_devices()
    assert [layout.name for layout in device.layouts] == ["whole"]
    assert device.layout.memory_bytes == part.memory_bytes == device.layout.partitions[0].memory_bytes
    with pytest.raises(UnknownLayout):
        hardware.apply_layout(device.id, "CPX/NPS1")


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
