"""The windows of the isolation benchmark, and the ratios that are computed from them."""

import ctypes
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.isolation_h200.bench import Bench, Member
from benchmarks.isolation_h200.calls import find_hooked, find_real
from benchmarks.isolation_h200.paired import compare_cost, compare_hogs, compare_latency, compare_tail, quantile
from benchmarks.isolation_h200.stage import Stage, Turn, Window

from aimgpu.domain import Priority

SERVER = Member(name="server", kind="decode", priority=Priority.HIGH, signal=True)
HOG = Member(name="hog", kind="gemm", priority=Priority.LOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    stage = Stage(Bench(folder, 1, workloads="tests.programs.isolation_tenant"))
    members = [SERVER, replace(SERVER, name="bare", priority=None, signal=False), HOG, replace(HOG, name="hog1")]
    stage.start(
        {
            "main": [
                replace(member, environment={"STANDIN_LOG": str(folder / "log"), "STANDIN_NAME": member.name})
                for member in members
            ]
        }
    )
    yield stage
    stage.close()


def read_log(folder: Path) -> list[tuple[str, float, float]]:
    return [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]


def test_hogs_work_around_the_windows_that_name_them_and_in_no_other(stage: Stage, folder: Path) -> None:
    turns = [("hog",), (), ("hog", "hog1"), ()]
    windows = [
        stage.serve(Turn(setup=str(len(hogs)), round=number, server="server", seconds=0.01, hogs=hogs))
        for number, hogs in enumerate(turns)
    ]
    log = read_log(folder)
    served = [entry for entry in log if entry[0] == "server"]
    for hogs, window, (_, begun, ended) in zip(turns, windows, served, strict=True):
        beside = {name: (first, last) for name, first, last in log if name != "server" and first < ended and last > begun}
        assert set(beside) == set(hogs)
        assert all(first < begun and last > ended for first, last in beside.values())
        assert hogs or window.hog_units == 0
        assert window.counted["requests"] == 5
    assert windows[0].idle_seconds == pytest.approx(windows[0].seconds - 0.01)


def test_a_server_without_the_library_is_measured_on_the_same_stage(stage: Stage) -> None:
    window = stage.serve(Turn(setup="bare", round=0, server="bare", seconds=0.01, signal=False))
    assert len(window.requests) == 5
    assert window.counted == dict.fromkeys(window.counted, 0.0)


def test_a_hog_alone_is_measured_between_its_first_and_last_unit(stage: Stage) -> None:
    assert stage.work("hog", 0.01) > 0


def make_windows(setup: str, rounds: list[list[float]], **changes: Any) -> list[Window]:
    return [
        Window(
            setup=setup,
            round=number,
            server=setup,
            requests=tuple(requests),
            steps=tuple(requests),
            seconds=10,
            counted={},
            **changes,
        )
        for number, requests in enumerate(rounds)
    ]


def test_latencies_are_compared_pooled_and_by_round() -> None:
    alone = make_windows("alone", [[1.0] * 20, [2.0] * 20])
    beside = make_windows("beside", [[1.1] * 20, [2.0] * 19 + [4.0]])
    got = compare_latency(beside, alone)
    assert got["p50_x"] == pytest.approx((1.1 + 2.0) / 2 / 1.5, abs=1e-4)
    assert got["p50_x_rounds"] == [1.0, 1.05, 1.1]
    assert got["p95_x"] == 1.0
    assert got["p95_x_rounds"] == [1.1, 1.55, 2.0]
    assert (got["requests"], got["alone_requests"]) == (40, 40)


def test_the_tail_is_given_in_launches() -> None:
    got = compare_tail(make_windows("beside", [[1.0] * 99 + [1.2]]), make_windows("alone", [[1.0] * 100]), 400.0)
    assert got == {"p99_later_in_launches": 0.5, "worst_later_in_launches": 0.5}


def test_hogs_are_measured_against_the_time_that_is_left() -> None:
    windows = make_windows("beside", [[1.0] * 5, [1.0] * 5], hog_units=300e12, hog_seconds=4.9)
    got = compare_hogs(windows, {"solo_tflops": 600.0})
    assert (got["hog_time_of_idle"], got["hog_share_of_idle"], got["hog_tflops"]) == (0.98, 1.0, 300.0)


def test_the_cost_is_that_of_all_steps_and_each_process_is_listed() -> None:
    windows = make_windows("bare", [[1.0] * 9, [1.1] * 9]) + make_windows("library", [[1.02] * 9, [1.111] * 9])
    got = compare_cost(windows)
    assert got["step_x"] == pytest.approx((1.02 + 1.111) / (1.0 + 1.1), abs=1e-4)
    assert got["step_x_rounds"] == [1.01, 1.015, 1.02]
    assert got["step_ms"] == {"bare": 1050.0, "library": 1065.5}


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100)]
    assert [quantile(values, at) for at in (0.5, 0.9, 0.99, 1.0)] == [49.5, 90.0, 99.0, 99.0]
    assert all(quantile(values[:count], at) in values for count, at in itertools.product((1, 2, 3), (0.9, 0.99, 1.0)))


def test_the_librarys_own_functions_are_found_by_its_table_of_symbols() -> None:
    """Without a hook both ways give the same address."""
    ctypes.CDLL("libz.so.1")
    assert find_real("deflate", "inflate", library="libz.so") == find_hooked("deflate", "inflate", library="libz.so.1")
