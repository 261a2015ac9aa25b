"""Who has which compute units, on disk: never handed out twice, whatever comes, goes or happens to the file."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.isolation.conftest import build_device, build_grant

from aimgpu.domain import Device, Grant, Vendor
from aimgpu.domain.compute import whole_units
from aimgpu.errors import HardwareUnavailable, InvalidInput, NotAllowed
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.cu_masks import CuMasks, choose_units, format_mask
from aimgpu.units import PPM

MakeDevice = Callable[..., Device]
DEVICE = build_device(vendor=Vendor.AMD)
PARTITION = DEVICE.layout.partitions[0]


def grant(name: str, ppm: int | None = 250_000, partition: str = PARTITION.id) -> Grant:
    return build_grant(DEVICE, id=name, compute_ppm=ppm, partition_id=partition)


def units_of(mask: str) -> set[int]:
    """Of `0:0-15,32`."""
    index, _, text = mask.partition(":")
    assert index == "0"
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def mask_of(masks: CuMasks, wanted: Grant) -> set[int]:
    return units_of(masks.enforce(wanted, DEVICE, PARTITION).environment["HSA_CU_MASK"])


DAMAGE = {
    "empty": b"",
    "cut": b'{"gpu0/whole-0": {"a": [0, 1',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "no table of grants": b'{"gpu0/whole-0": [0, 1]}',
    "no list of units": b'{"gpu0/whole-0": {"a": "0-15"}}',
    "no units": b'{"gpu0/whole-0": {"a": ["0", null]}}',
    "no whole units": b'{"gpu0/whole-0": {"a": [1.5]}}',
}


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_book_that_cannot_be_read_hands_out_nothing_and_says_what_to_do(tmp_path: Path, data: bytes) -> None:
    """Begun again it would give units away that a running model has."""
    path = tmp_path / "masks.json"
    path.write_bytes(data)
    masks = CuMasks(path)
    with pytest.raises(HardwareUnavailable) as caught:
        masks.enforce(grant("b"), DEVICE, PARTITION)
    assert str(path) in caught.value.message
    assert "remove the file" in str(caught.value.hint)
    assert path.read_bytes() == data


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE.keys())
def test_with_such_a_book_a_model_can_still_be_stopped_and_one_without_a_limit_started(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "masks.json"
    path.write_bytes(data)
    chooser = MechanismChooser(companions=[CuMasks(path)])
    chooser.release(grant("a"))
    assert chooser.enforce(grant("b", None), DEVICE, PARTITION).environment == {}
    assert path.read_bytes() == data


def test_a_book_that_was_removed_is_begun_again(tmp_path: Path) -> None:
    masks = CuMasks(tmp_path / "new" / "masks.json")
    masks.release(grant("a"))
    assert not (tmp_path / "new").exists()
    assert mask_of(masks, grant("a")) == set(range(76))
    assert os.listdir(tmp_path / "new") == ["masks.json"]  # noqa: PTH208 - nothing is left beside it


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from((10_000, 62_500, 125_000, 250_000, 333_333, 500_000, PPM))), max_size=16
    )
)
def test_over_any_coming_and_going_units_belong_to_one_model_each(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int]]
) -> None:
    """Whoever is there leaves, whoever is not comes; another daemon reads the same book in between."""
    path = tmp_path_factory.mktemp("masks") / "masks.json"
    held: dict[str, set[int]] = {}
    for number, ppm in events:
        name = f"g{number}"
        masks = CuMasks(path)
        if name in held:
            masks.release(grant(name))
            del held[name]
            continue
        wanted = grant(name, ppm)
        taken = set().union(*held.values()) if held else set()
        if ppm >= PPM:
            assert masks.enforce(wanted, DEVICE, PARTITION).environment == {}
            continue
        try:
            mine = mask_of(masks, wanted)
        except NotAllowed:
            assert 304 - len(taken) < whole_units(ppm, 304)
            continue
        assert not mine & taken
        assert len(mine) == whole_units(ppm, 304)
        assert mine <= set(range(304))
        assert mask_of(CuMasks(path), wanted) == mine, "asked again, the same"
        held[name] = mine
    kept = json.loads(path.read_text()).get(PARTITION.id, {}) if path.exists() else {}
    assert {name: set(units) for name, units in kept.items()} == held


def test_partitions_have_books_of_their_own(tmp_path: Path) -> None:
    masks = CuMasks(tmp_path / "masks.json")
    first = mask_of(masks, grant("a", 900_000))
    second = units_of(masks.enforce(grant("b", 900_000, "gpu0/whole-1"), DEVICE, PARTITION).environment["HSA_CU_MASK"])
    assert first == second
    with pytest.raises(NotAllowed, match="are free") as caught:
        masks.enforce(grant("c", 900_000), DEVICE, PARTITION)
    assert caught.value.hint
    assert "c" not in (tmp_path / "masks.json").read_text()


@pytest.mark.parametrize(
    ("product", "partitions", "dies"), [("MI300X", 1, 8), ("MI300X", 8, 1), ("MI300A", 3, 2), ("other", 1, 1)]
)
def test_the_least_mask_has_a_unit_on_every_die_of_the_partition(
    tmp_path: Path, product: str, partitions: int, dies: int
) -> None:
    device = build_device(vendor=Vendor.AMD, partitions=partitions)
    device = type(device)(**{name: getattr(device, name) for name in device.__slots__} | {"product": product})
    part = device.layout.partitions[0]
    masks = CuMasks(tmp_path / "masks.json")
    found = units_of(masks.enforce(grant("a", 1, part.id), device, part).environment["HSA_CU_MASK"])
    assert len(found) == dies
    assert {unit % dies for unit in found} == set(range(dies))


@given(st.sets(st.integers(0, 400), min_size=1, max_size=60))
def test_a_mask_names_exactly_its_units(units: set[int]) -> None:
    assert units_of(format_mask(0, units)) == units
    assert format_mask(3, units).startswith("3:")


def test_no_mask_is_empty() -> None:
    with pytest.raises(InvalidInput):
        format_mask(0, ())
    with pytest.raises(NotAllowed):
        choose_units(304, 8, range(0, 304, 8), 10_000)  # one die is wholly taken: a queue on it would not run
