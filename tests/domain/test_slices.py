"""MIG layouts by name: what is placed can be, what can be is placed, and what cannot names the rule that it breaks."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.domain.mig import PROFILES
from tests.examples import examples

from aimgpu.domain.slices import EMPTY, Placed, find_conflict, layout_name, parse_layout, place
from aimgpu.errors import UnknownLayout

BY_KIND = {profile.kind: profile for profile in PROFILES}
KINDS = st.sampled_from(sorted(BY_KIND))
COMPUTE_SLICES, MEMORY_SLICES = 7, 8


def brute_force(kinds: Sequence[str]) -> set[tuple[Placed, ...]]:
    """Every legal way to place these, by trying all starts."""
    options = [[Placed(kind=kind, start=start) for start in BY_KIND[kind].starts] for kind in kinds]
    return {tuple(sorted(tried)) for tried in product(*options) if is_legal(tried)}


def is_legal(placed: Sequence[Placed]) -> bool:
    taken = [one.start + offset for one in placed for offset in range(BY_KIND[one.kind].memory_slices)]
    counts = all(sum(one.kind == kind for one in placed) <= profile.at_most for kind, profile in BY_KIND.items())
    compute = sum(BY_KIND[one.kind].compute_slices for one in placed)
    return len(taken) == len(set(taken)) and max(taken, default=0) < MEMORY_SLICES and counts and compute <= COMPUTE_SLICES


def placed_or_none(wanted: Sequence[tuple[str, int | None]]) -> tuple[Placed, ...] | None:
    try:
        return place(wanted, PROFILES)
    except UnknownLayout:
        return None


@settings(max_examples=examples(40))
@given(st.lists(KINDS, min_size=1, max_size=5))
def test_kinds_without_a_start_are_placed_exactly_where_that_is_possible(kinds: list[str]) -> None:
    found = placed_or_none([(kind, None) for kind in kinds])
    possible = brute_force(kinds)
    assert found in possible if possible else found is None


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(KINDS, st.integers(0, 7)), min_size=1, max_size=4))
def test_a_layout_with_all_its_starts_is_taken_as_it_is_or_refused(wanted: list[tuple[str, int]]) -> None:
    given_starts = tuple(sorted(Placed(kind=kind, start=start) for kind, start in wanted))
    allowed = all(start in BY_KIND[kind].starts for kind, start in wanted) and is_legal(given_starts)
    assert placed_or_none(wanted) == (given_starts if allowed else None)


@settings(max_examples=examples(40))
@given(st.lists(KINDS, min_size=1, max_size=4), st.data())
def test_a_fixed_start_is_kept_and_the_rest_is_fitted_around_it(kinds: list[str], data: st.DataObject) -> None:
    possible = sorted(brute_force(kinds))
    if not possible:
        return
    (chosen, *others) = data.draw(st.sampled_from(possible))
    found = place([(chosen.kind, chosen.start), *((other.kind, None) for other in others)], PROFILES)
    assert chosen in found
    assert is_legal(found)


@settings(max_examples=examples(40))
@given(st.lists(KINDS, min_size=1, max_size=4), st.data())
def test_instances_that_are_there_already_stay_where_they_are(kinds: list[str], data: st.DataObject) -> None:
    possible = sorted(brute_force(kinds))
    if possible:
        there = data.draw(st.sampled_from(possible))
        assert place([(one.kind, None) for one in there], PROFILES, there) == there


@settings(max_examples=examples(40))
@given(st.lists(KINDS, max_size=4), st.data())
def test_the_name_of_a_layout_reads_back_as_the_layout(kinds: list[str], data: st.DataObject) -> None:
    possible = sorted(brute_force(kinds))
    placed = data.draw(st.sampled_from(possible)) if possible else ()
    assert parse_layout(layout_name(placed)) == tuple((one.kind, one.start) for one in placed)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (EMPTY, ()),
        ("1g.18gb", (("1g.18gb", None),)),
        (" 1G.18GB@3 ", (("1g.18gb", 3),)),
        ("1g.18gb+me", (("1g.18gb+me", None),)),
        ("1g.18gb+me@0+3g.71gb@4", (("1g.18gb+me", 0), ("3g.71gb", 4))),
        ("3g.71gb+1g.18gb+me", (("3g.71gb", None), ("1g.18gb+me", None))),
    ],
)
def test_a_layout_may_be_written_with_and_without_starts(name: str, meant: tuple[tuple[str, int | None], ...]) -> None:
    assert parse_layout(name) == meant


@pytest.mark.parametrize(
    "name", ["", "+", "1g.18gb++2g.35gb", "@0", "1g.18gb@", "1g.18gb@x", "1g.18gb@-1", "me", "1g.18gb@0@1"]
)
def test_what_is_no_layout_is_refused_with_how_to_write_one(name: str) -> None:
    with pytest.raises(UnknownLayout) as caught:
        parse_layout(name)
    assert "1g.18gb@0+3g.71gb@4" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        ([("9g.1gb", None)], "this device has no profile 9g.1gb", "It has: 1g.18gb"),
        ([("2g.35gb", 1)], "2g.35gb cannot start at slice 1", "It can start at: 0, 2, 4."),
        ([("1g.18gb", 0), ("1g.35gb", 0)], "1g.18gb@0 and 1g.35gb@0 overlap", "partition list --all"),
        ([("1g.18gb+me", None), ("1g.18gb+me", None)], "2 of 1g.18gb+me, at most 1 fit", "partition list --all"),
        ([("4g.71gb", None), ("4g.71gb", None)], "2 of 4g.71gb, at most 1 fit", "partition list --all"),
        ([("4g.71gb", None), ("3g.71gb", None), ("1g.18gb", None)], "8 compute slices, the device has 7", "partition list"),
        ([("3g.71gb", None), ("2g.35gb", 0), ("1g.35gb", 6)], "there is no place for all of them", "partition list"),
    ],
)
def test_a_layout_that_cannot_be_names_the_rule_it_breaks(
    wanted: list[tuple[str, int | None]], message: str, hint: str
) -> None:
    with pytest.raises(UnknownLayout) as caught:
        place(wanted, PROFILES)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_device_without_profiles_has_no_layout_but_the_empty_one() -> None:
    assert place([], ()) == ()
    with pytest.raises(UnknownLayout, match="no profile") as caught:
        place([("1g.18gb", None)], ())
    assert caught.value.hint == "It has: none."


@settings(max_examples=examples(40))
@given(st.lists(st.builds(Placed, kind=KINDS, start=st.integers(0, 6)), max_size=5))
def test_a_conflict_is_found_exactly_where_there_is_one(placed: list[Placed]) -> None:
    fits_in = all(one.start + BY_KIND[one.kind].memory_slices <= MEMORY_SLICES for one in placed)
    if fits_in:
        assert (find_conflict(placed, BY_KIND) is None) == is_legal(placed)


def test_only_plain_profiles_are_proposed() -> None:
    assert [profile.kind for profile in PROFILES if not profile.plain] == ["1g.18gb+me"]
