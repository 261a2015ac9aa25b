"""Engines' own metrics under one set of names, whatever the engine; read in the background, never by a scrape."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from aimgpu.engines.health import ask
from aimgpu.engines.ownership import EngineOwner
from aimgpu.errors import StrangerListens

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})?\s+(\S+)")
_MOST_BYTES = 4 << 20
_TIMEOUT_SECONDS = 1.0
_MOST_AT_ONCE = 8

# Ours -> theirs, by engine. Several names are tried in order: engines rename theirs between versions.
ENGINE_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "aim_engine_requests_running": ("vllm:num_requests_running",),
        "aim_engine_requests_waiting": ("vllm:num_requests_waiting",),
        "aim_engine_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "aim_engine_prompt_tokens": ("vllm:prompt_tokens_total",),
        "aim_engine_generation_tokens": ("vllm:generation_tokens_total",),
        "aim_engine_preemptions": ("vllm:num_preemptions_total",),
        "aim_engine_prefix_cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "aim_engine_prefix_cache_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    },
    "llamacpp": {
        "aim_engine_requests_running": ("llamacpp:requests_processing",),
        "aim_engine_requests_waiting": ("llamacpp:requests_deferred",),
        "aim_engine_kv_cache_usage_ratio": ("llamacpp:kv_cache_usage_ratio",),
        "aim_engine_prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "aim_engine_generation_tokens": ("llamacpp:tokens_predicted_total",),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTarget:
    instance_id: str
    model: str
    engine: str
    url: str  # where the engine itself answers
    api_key: str
    owner: EngineOwner | None = None  # whose the address must be, if it is on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """`up` False: it has metrics, and they could not be read."""

    target: EngineTarget
    up: bool
    values: Mapping[str, float] = field(default_factory=dict)  # by our names


_OK = 200
_NONE = (404, 405, 501)
ReadTargets = Callable[[], Sequence[EngineTarget]]
Fetch = Callable[[EngineTarget], str | None]  # the text; None: the engine has no metrics at all. Raises OSError.


class EngineMetrics:
    """Reads every engine at most every `interval_seconds`, when asked; what is asked for is what was read last."""

    def __init__(self, read_targets: ReadTargets, *, interval_seconds: float = 5.0, fetch: "Fetch | None" = None) -> None:
        self._read_targets = read_targets
        self._interval_seconds = interval_seconds
        self._fetch = fetch or fetch_metrics
        self._lock = threading.Lock()
        self._readings: tuple[EngineReading, ...] = ()
        self._began = -math.inf
        self._running = False

    def read(self) -> tuple[EngineReading, ...]:
        """Never waits."""
        with self._lock:
            due = not self._running and time.monotonic() - self._began >= self._interval_seconds
            if due:
                self._running = True
                self._began = time.monotonic()
                threading.Thread(target=self._refresh, name="engine-metrics", daemon=True).start()
            return self._readings

    def refresh(self) -> tuple[EngineReading, ...]:
        """Read now, and wait for it."""
        targets = [one for one in self._read_targets() if one.engine in ENGINE_NAMES]
        found: list[EngineReading | None] = []
        if targets:
            with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(targets))) as pool:
                found = list(pool.map(self._read_one, targets))
        with self._lock:
            self._readings = tuple(one for one in found if one is not None)
            return self._readings

    def _refresh(self) -> None:
        try:
            self.refresh()
        finally:
            with self._lock:
                self._running = False

    def _read_one(self, target: EngineTarget) -> EngineReading | None:
        try:
            text = self._fetch(target)
        except (OSError, ValueError, StrangerListens):
            return EngineReading(target=target, up=False)
        return None if text is None else EngineReading(target=target, up=True, values=map_names(target.engine, text))


def map_names(engine: str, text: str) -> dict[str, float]:
    """Sums over all series of a name: an engine labels by model, worker or rank."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            sums[match[1]] = sums.get(match[1], 0.0) + value
    return {ours: sums[name] for ours, theirs in ENGINE_NAMES[engine].items() if (name := _first(theirs, sums)) is not None}


def _first(names: Iterable[str], known: Mapping[str, float]) -> str | None:
    return next((name for name in names if name in known), None)


def fetch_metrics(target: EngineTarget) -> str | None:
    """The engine's /metrics; None where it does not serve them. Raises OSError or StrangerListens."""
    key = target.api_key or None
    url = f"{target.url}/metrics"
    answer = ask(url, api_key=key, bound_seconds=_TIMEOUT_SECONDS, owner=target.owner, most_bytes=_MOST_BYTES)
    if answer is None:
        raise OSError(f"no answer from {url}")
    if answer.status in _NONE:
        return None
    if answer.status != _OK:
        raise OSError(f"{url} answers {answer.status}")
    return answer.body.decode("utf-8", "replace")
