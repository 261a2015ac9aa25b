"""The harnesses of fuzzing by coverage take the inputs that they begin with."""

import pytest
from tests.wide.coverage_fuzz import HARNESSES, Counts, read_corpus, read_counts


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_finds_nothing_in_what_it_begins_with_nor_in_what_is_kept(name: str) -> None:
    once, seeds = HARNESSES[name]()
    for data in (*seeds, *read_corpus(name), b"", b"\x00", b"\xff" * 9):
        once(data)
    assert len(set(seeds)) == len(seeds) > 20


def test_the_last_counts_are_those_of_the_record() -> None:
    said = "#2 INITED cov: 3 ft: 4 corp: 1/1b\n#8192 pulse  cov: 625 ft: 1056 corp: 60/1kb exec/s: 9\nstat::x: 1\n"
    assert read_counts(said) == Counts(8192, 625, 1056, 60)
    assert read_counts("no module named atheris") is None
