"""The section `partition`: a chat model beside one batch model under MPS that may use all, half or a quarter of the SMs.

Each alone, then side by side with the gate off, then at a fixed share with and without the wait for a pause between two steps
of chat, then by promise, with the most promising neighbour first. All shares are of the batch model with all SMs alone.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.engines_h200_load import percentile
from benchmarks.engines_h200_sharing import BATCH_TOKENS, CHAT_TOKENS, TAIL, Alone, compare, low_priority, times
from benchmarks.engines_h200_sweep import OFF, Gate, GpuCounters, Setting

if TYPE_CHECKING:
    from benchmarks.engines_h200 import Run

PERCENTAGES = {"batch": 100, "half": 50, "quarter": 25}  # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
_FULL = 1_000_000
_NO_WAIT = {"pause_wait_ns": OFF}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fixed share in millionths, or a promise of `factor` times alone."""

    neighbour: str
    share_ppm: int = _FULL
    factor: float | None = None
    header: dict[str, int] = field(default_factory=lambda: dict(_NO_WAIT))
    seconds: float = 6.0
    settle: float = 2.0

    @property
    def label(self) -> str:
        wanted = f"promise {self.factor}" if self.factor else f"share {self.share_ppm / _FULL:g}"
        return f"{self.neighbour}, {wanted}" + ("" if self.header or self.share_ppm == _FULL else ", waits for a pause")

    @property
    def needed(self) -> float:
        return self.seconds + self.settle + TAIL + 4


def run_partition(run: "Run", chat: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Four models at once; what does not fit into the time is left out."""
    result: dict[str, Any] = {"rows": []}
    run.results["sections"]["partition"] = result  # what was measured is saved also if the rest is not
    chat = {**chat, "env": run.mps}
    done = run.apply({"chat": chat} | {name: _neighbour(run, batch, name) for name in PERCENTAGES}, replace=True)
    run.say(f"partition: models ready after {done['ready_seconds']} {done['error'] or ''} {done['stages']}")
    result["ready_seconds"] = done["ready_seconds"]
    with Gate(run, done["instances"]) as gate, GpuCounters() as gpu:
        bench = _Bench(run, gate, gpu, chat, result)
        bench.measure_alone()
        for name in PERCENTAGES:
            bench.measure(Row(neighbour=name))
        bench.measure(Row(neighbour="batch", share_ppm=300_000))
        bench.measure(Row(neighbour="batch", share_ppm=300_000, header={}))
        best, second, third = bench.by_prospect(1.15)
        bench.measure(Row(neighbour=best, factor=1.15, seconds=24, settle=10))
        bench.measure(Row(neighbour=second, factor=1.15, seconds=20, settle=8))
        bench.measure(Row(neighbour="batch", factor=1.6, seconds=12, settle=8))
        bench.measure(Row(neighbour=third, factor=1.15, seconds=14, settle=8))
    return result


def _neighbour(run: "Run", batch: dict[str, Any], name: str) -> dict[str, Any]:
    limit = {} if PERCENTAGES[name] == 100 else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(PERCENTAGES[name])}  # noqa: PLR2004
    return {**batch, "env": {**low_priority(run.mps), **limit}}


class _Bench:
    def __init__(self, run: "Run", gate: Gate, gpu: GpuCounters, chat: dict[str, Any], result: dict[str, Any]) -> None:
        self._run, self._gate, self._gpu, self._chat, self._result = run, gate, gpu, chat, result
        self._alone: Alone
        self._solo: dict[str, float] = {}

    def measure_alone(self) -> None:
        run = self._run
        self._gate.set(Setting("open", "batch", _FULL))
        chat = run.read_load(run.load("chat", "chat", seconds=10, after=2, tokens=CHAT_TOKENS), "chat")
        batch = {}
        for name in PERCENTAGES:
            process = run.load("batch", name, seconds=5, after=2, tokens=BATCH_TOKENS)
            time.sleep(3)
            self._gpu.begin()
            time.sleep(2)
            busy = self._gpu.end()
            batch[name] = run.read_load(process, name)
            self._solo[name] = batch[name]["tokens_per_second"]
            run.say(f"{name} alone: {self._solo[name]:.0f} tokens/s, GPU {busy}")
        self._alone = Alone(chat, batch["batch"], batch["batch"])
        rates = {name: round(rate) for name, rate in self._solo.items()}
        self._result["alone"] = times(chat) | {"windows_p95_ms": _ms(chat["windows"], 0.95), "batch_tokens_per_second": rates}
        run.say(f"alone: {self._result['alone']}")
        run.save()

    def measure(self, row: Row) -> None:
        run, rows = self._run, self._result["rows"]
        if run.left < row.needed:
            rows.append({"set_up": row.label, "left_out": True})
            return
        promise_ms = round(percentile(self._alone.chat["tpot"], 0.95) * row.factor * 1000, 3) if row.factor else None
        if promise_ms:
            run.apply({"chat": {**self._chat, "sharing": "promise", "slo": {"tpot_p95": f"{promise_ms}ms"}}})
        self._gate.set(Setting(row.label, row.neighbour, 0 if promise_ms else row.share_ppm, row.header))
        seen = self._side_by_side(row)
        counted = self._gate.read(row.neighbour)
        if promise_ms:
            run.apply({"chat": {**self._chat, "sharing": "strict"}})
        self._gate.set(Setting("open", "batch", _FULL))
        seen["batch"] = run.read_load(seen.pop("heavy"), row.neighbour)
        time.sleep(1.5 if promise_ms else 0)  # the daemon drops what its loop learned, and shuts the gate once more
        found = compare(seen, promise_ms, self._alone) | {"windows_p95_ms": _ms(seen["chat"]["windows"], 0.95), "seen": counted}
        rows.append(found | {"gpu": seen["gpu"]})
        run.say(str({key: value for key, value in rows[-1].items() if key not in ("requests_seen", "batch_ends")}))
        run.save()

    def _side_by_side(self, row: Row) -> dict[str, Any]:
        run = self._run
        heavy = run.load("batch", row.neighbour, seconds=row.seconds, after=row.settle, tokens=BATCH_TOKENS)
        light = run.load("chat", "chat", seconds=row.seconds, after=row.settle, tokens=CHAT_TOKENS, tail=TAIL)
        time.sleep(row.settle + 1)
        self._gpu.begin()
        shares = []
        while light.poll() is None:
            entry = run.daemon.client().read_status()["sharing"].get("chat", {})
            shares.append((round(entry.get("share") or 0, 3), entry.get("promise_used")))
            time.sleep(0.5)
        return {
            "set_up": row.label,
            "chat": run.read_load(light, "chat"),
            "heavy": heavy,
            "shares": shares,
            "gpu": self._gpu.end(),
        }

    def by_prospect(self, factor: float) -> list[str]:
        """Neighbours, the one first that would do most if its cost grew evenly with its rate, up to the promise."""
        bound = percentile(self._alone.chat["tpot"], 0.95) * 1000 * factor
        alone = _ms(self._alone.chat["windows"], 0.95)
        prospects: dict[str, float] = {}
        for name in PERCENTAGES:
            row: dict[str, Any] = next((one for one in self._result["rows"] if one["set_up"] == Row(neighbour=name).label), {})
            cost = row.get("windows_p95_ms", bound) - alone
            prospects[name] = row.get("batch_tokens_per_second", 0) * min(1.0, (bound - alone) / max(cost, 1e-6))
        self._run.say(f"prospects: { {name: round(one) for name, one in prospects.items()} }")
        return sorted(prospects, key=lambda name: -prospects[name])


def _ms(seconds: list[float], part: float) -> float:
    return round(percentile(seconds, part) * 1000, 3)
