"""The section `sweep`: settings of the gate beside a tenant that yields, each at a fixed share, with two kinds of neighbours.

The neighbour `batch` runs each decode step as one CUDA graph, `pieces` the same model with piecewise graphs. Beside what the
callers measured, each row has what the library counted (launches by kind, pauses between steps, lengths), and how
busy the GPU was by its own counters.
"""

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aimgpu.isolation.interposer import regions_directory
from aimgpu.isolation.layout import PAUSES
from aimgpu.isolation.region import Region
from benchmarks.engines_h200.load import percentile

if TYPE_CHECKING:
    from benchmarks.engines_h200.run import Run

MS = 1_000_000
OFF = 1  # of a setting; 0 is the library's default
_SETTINGS = ("light_ns", "overdraft_ns", "pause_wait_ns", "burst_ns", "yield_room_ns", "fill_ns")
_FULL = 1_000_000
_SETTLE, _TOKENS = 2, 128


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: the share in millionths, and what differs from the library's defaults."""

    label: str
    neighbour: str
    share_ppm: int
    header: dict[str, int] = field(default_factory=dict)


_ALL_WAIT = {"light_ns": OFF}
SETTINGS = (
    Setting("default, 0.15", "batch", 150_000),
    Setting("fair", "batch", _FULL),
    Setting("no wait for a pause, 0.15", "batch", 150_000, {"pause_wait_ns": OFF}),
    Setting("default, 0.25", "batch", 250_000),
    Setting("pieces, 0.15", "pieces", 150_000),
    Setting("pieces, fair", "pieces", _FULL),
    Setting("pieces fill pauses, 0.001", "pieces", 1_000, {"fill_ns": 30_000}),
    Setting("pieces fill pauses, 0.1", "pieces", 100_000, {"fill_ns": 30_000}),
    Setting(
        "bursts of 6 ms, bounded, 0.2",
        "batch",
        200_000,
        {**_ALL_WAIT, "pause_wait_ns": OFF, "burst_ns": 6 * MS, "yield_room_ns": 2},
    ),
    Setting("bursts of 2 ms in pauses, 0.15", "batch", 150_000, {**_ALL_WAIT, "burst_ns": 2 * MS}),
    Setting("pieces, 2 ms at a time, 0.15", "pieces", 150_000, {"overdraft_ns": 2 * MS}),
    Setting("default, 0.4", "batch", 400_000),
    Setting("pieces, 0.25", "pieces", 250_000),
    Setting("strict", "batch", 0),
    Setting("bounded, 0.15", "batch", 150_000, {"yield_room_ns": 2}),
)


def run_sweep(run: "Run", chat: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Three models at once, then each alone, then the settings in turn, as far as there is time."""
    pieces = {**batch, "args": {"compilation-config": '{"cudagraph_mode":"PIECEWISE"}'}}
    done = run.apply({"chat": chat, "batch": batch, "pieces": pieces}, replace=True)
    run.say(f"sweep: models ready after {done['ready_seconds']} {done['error'] or ''}")
    seconds = run.given.seconds
    with _GpuCounters() as gpu, _Gate(run, done["instances"]) as gate:
        alone: dict[str, Any] = {}
        for name, kind, tokens in (("chat", "chat", 96), ("batch", "batch", _TOKENS), ("pieces", "batch", _TOKENS)):
            gate.set(Setting("alone", "batch", 0))
            process = run.load(kind, name, seconds=seconds, after=_SETTLE, tokens=tokens)
            time.sleep(_SETTLE + 1)
            gpu.begin()
            time.sleep(max(1.0, seconds - 2))
            busy = gpu.end()
            alone[name] = run.read_load(process, name)
            run.say(f"alone {name}: {_short(alone[name])} gpu {busy} {gate.read(name)}")
        rows = []
        for setting in SETTINGS:
            if run.left < run.given.sweep_leaves + seconds + 6:
                rows.append({"set_up": setting.label, "left_out": True})
                continue
            rows.append(_measure(run, setting, gate, gpu, alone))
            run.say(str(rows[-1]))
        gate.set(Setting("end", "batch", 0))
    return {"alone": {name: _short(found) for name, found in alone.items()}, "rows": rows}


def _measure(run: "Run", setting: Setting, gate: "_Gate", gpu: "_GpuCounters", alone: dict[str, Any]) -> dict[str, Any]:
    seconds, name = run.given.seconds, setting.neighbour
    gate.set(setting)
    heavy = run.load("batch", name, seconds=seconds, after=_SETTLE, tokens=_TOKENS)
    light = run.load("chat", "chat", seconds=seconds, after=_SETTLE, tokens=96)
    time.sleep(_SETTLE + 1)
    gpu.begin()
    time.sleep(max(1.0, seconds - 2))
    busy = gpu.end()
    chat = run.read_load(light, "chat")
    seen = gate.read(name)
    gate.set(Setting("drain", name, _FULL))  # so that its last answers are soon over
    rate = run.read_load(heavy, name)["tokens_per_second"]
    slowdown = percentile(chat["tpot"], 0.5) / percentile(alone["chat"]["tpot"], 0.5)
    share = rate / alone["batch"]["tokens_per_second"]
    return {
        "set_up": setting.label,
        "tpot_p50_x": round(slowdown, 3),
        "window_p95_x": round(percentile(chat["windows"], 0.95) / percentile(alone["chat"]["tpot"], 0.95), 3),
        "batch_share": round(share, 3),
        "speed_plus_share": round(1 / slowdown + share, 3),
        "chat": _short(chat),
        "gpu": busy,
        "seen": seen,
    }


def _short(found: dict[str, Any]) -> dict[str, Any]:
    if "tpot" not in found:
        return {"tokens_per_second": round(found["tokens_per_second"])}
    pick = {"tpot": (0.5, 0.95), "windows": (0.5, 0.95), "ttft": (0.5,)}
    return {f"{key}_{part}": round(percentile(found[key], part) * 1000, 3) for key, parts in pick.items() for part in parts}


class _Gate:
    """The region of the one GPU, written to directly: the daemon's loop steers no model whose sharing is strict."""

    def __init__(self, run: "Run", instances: dict[str, Any]) -> None:
        paths = sorted(regions_directory(run.daemon.home.path).rglob("*.region"))
        self._region = Region.open(paths[0])
        self._ids = {name: str(one["id"]) for name, one in instances.items()}
        self._before: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        header = self._region.header
        for name in _SETTINGS:
            setattr(header, name, 0)
        self._region.close()

    def set(self, setting: Setting) -> None:
        header = self._region.header
        for name in _SETTINGS:
            setattr(header, name, setting.header.get(name, 0))
        header.admitted[:] = [0] * 4
        header.step_pauses[:] = header.lengths[:] = [0] * PAUSES
        self._region.set_yield(self._ids["chat"], setting.share_ppm)
        self._before = {name: self._tenant(name).gpu_ns for name in self._ids}

    def read(self, neighbour: str) -> dict[str, Any]:
        """Milliseconds; histograms as the upper end of a bucket in microseconds: count."""
        header, tenant = self._region.header, self._tenant(neighbour)
        return {
            "gpu_ms": (tenant.gpu_ns - self._before[neighbour]) // MS,
            "longest_us": tenant.longest_launch_ns // 1000,
            "admitted": list(header.admitted),
            "pause_us": self._tenant("chat").step_pause_ns // 1000,
            "pauses": _histogram(header.step_pauses),
            "lengths": _histogram(header.lengths),
        }

    def _tenant(self, name: str) -> Any:  # noqa: ANN401 - a ctypes record
        wanted = self._ids[name].encode()
        return next(one for one in self._region._layout.tenants if one.name == wanted)  # noqa: SLF001


def _histogram(counts: Any) -> dict[int, int]:  # noqa: ANN401 - a ctypes array
    return {round(8.192 * 2 ** ((at + 1) / 2)): int(count) for at, count in enumerate(counts) if count}


class _GpuCounters:
    """Percent: of the time that anything ran, of SMs that were busy, of the memory's bandwidth; empty where not offered."""

    def __enter__(self) -> Self:
        self._library: Any = None
        with contextlib.suppress(Exception):
            import pynvml  # noqa: PLC0415 - only where there is a GPU

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
            self._library = pynvml
        return self

    def __exit__(self, *_: object) -> None:
        """Samples end with the process."""

    def begin(self) -> None:
        self._sample(0)

    def end(self) -> dict[str, float]:
        self._sample(1)
        found: dict[str, float] = {}
        with contextlib.suppress(Exception):
            asked = self._library.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = self._library.NVML_GPM_METRICS_GET_VERSION, 3
            asked.sample1, asked.sample2 = self._samples
            for at, metric in enumerate((1, 2, 10)):
                asked.metrics[at].metricId = metric
            self._library.nvmlGpmMetricsGet(asked)
            found = {name: round(asked.metrics[at].value, 1) for at, name in enumerate(("busy", "sm", "memory"))}
        return found

    def _sample(self, at: int) -> None:
        with contextlib.suppress(Exception):
            self._library.nvmlGpmSampleGet(self._device, self._samples[at])
