"""The program that `doctor --verify` and `demo` start: which driver it takes, what it calls first, and how it fails."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from aimgpu.isolation import probe


class Driver:
    """A driver's library that notes every call; `failing` answers with a code."""

    def __init__(self, failing: dict[str, int]) -> None:
        self.called: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_values: object) -> int:
            self.called.append(name)
            return self._failing.get(name, 0)

        return call


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """What it prints, and what it called of the driver."""

    def run(*words: str, **failing: int) -> tuple[dict[str, Any], list[str]]:
        driver = Driver(failing)
        monkeypatch.setattr(probe, "_load", lambda _names: driver)
        capsys.readouterr()
        assert probe.main(words) == 0
        return json.loads(capsys.readouterr().out), driver.called

    return run


@pytest.mark.parametrize(
    ("vendor", "first", "allocates"),
    [("cuda", ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"], "cuMemAlloc_v2"), ("hip", ["hipInit"], "hipMalloc")],
)
def test_the_driver_is_initialised_before_memory_is_asked_for_and_a_refusal_is_an_answer(
    ask: Callable[..., tuple[dict[str, Any], list[str]]], vendor: str, first: list[str], allocates: str
) -> None:
    assert ask(vendor, "allocate", "4096") == ({"allocated": True}, [*first, allocates])
    assert ask(vendor, "allocate", "4096", **{allocates: 2}) == ({"allocated": False}, [*first, allocates])
    failed, called = ask(vendor, "allocate", "4096", **{first[0]: 3})
    assert (failed, called) == ({"error": f"{first[0]} failed with 3"}, first[:1])


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_driver_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], vendor: str
) -> None:
    monkeypatch.setattr(probe, "_CUDA", ("no-such-cuda.so.1",))
    monkeypatch.setattr(probe, "_HIP", ("no-such-hip.so.7", "no-such-hip.so"))
    probe.main([vendor, "allocate", "1"])
    named = {"cuda": "no-such-cuda.so.1", "hip": "no-such-hip.so.7"}[vendor]
    assert json.loads(capsys.readouterr().out) == {"error": f"{named} cannot be loaded"}


@pytest.mark.parametrize("cap", [0, 1, 511, 1000, 4095, 4096, 5000])
def test_what_fills_gets_every_byte_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cap: int
) -> None:
    class Capped:
        held = 0

        def allocate(self, size: int) -> bool:
            fits = self.held + size <= cap
            self.held += size if fits else 0
            return fits

    monkeypatch.setattr("sys.stdin", io.StringIO())
    api: Any = Capped()
    probe.PROGRAMS["fill"](api, "4096")
    assert json.loads(capsys.readouterr().out) == {"at_once": cap >= 4096, "held_bytes": min(cap, 4096)}
    assert api.held == min(cap, 4096)
