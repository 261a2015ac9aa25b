"""The GPU's clocks and power while a row of the isolation benchmark runs; only read, never set."""

import ctypes
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.isolation_h200.nvml import Sampler, open_nvml

EVERY_SECONDS = 0.025
SM, MEMORY = 1, 2  # kinds of clock
REASONS = {
    0x1: "idle",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class ClockSampler(Sampler):
    """Clocks, power and what limits them, every 25 ms."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: list[tuple[float, int, int, float, int]] = []

    def _run(self) -> None:
        library, device = open_nvml()
        while not self._done.wait(EVERY_SECONDS):
            sm, memory, power, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
            library.nvmlDeviceGetClockInfo(device, SM, ctypes.byref(sm))
            library.nvmlDeviceGetClockInfo(device, MEMORY, ctypes.byref(memory))
            library.nvmlDeviceGetPowerUsage(device, ctypes.byref(power))
            library.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons))
            self._samples.append((time.monotonic(), sm.value, memory.value, power.value / 1000, reasons.value))

    def describe(self, busy: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """Medians over everything, and while a request was served; how often which limit was in force."""
        during = [sample for sample in self._samples if any(start <= sample[0] <= end for start, end in busy)]
        return {"all": summarise(self._samples), "in_requests": summarise(during)}


def summarise(samples: Sequence[tuple[float, int, int, float, int]]) -> dict[str, Any]:
    if not samples:
        return {"samples": 0}
    clocks = sorted(sample[1] for sample in samples)
    return {
        "samples": len(samples),
        "sm_mhz": statistics.median(clocks),
        "sm_mhz_least": clocks[0],
        "sm_mhz_most": clocks[-1],
        "memory_mhz": statistics.median(sample[2] for sample in samples),
        "watts": round(statistics.mean(sample[3] for sample in samples), 1),
        "limited_by": {
            name: round(sum(bool(sample[4] & bit) for sample in samples) / len(samples), 3) for bit, name in REASONS.items()
        },
    }
