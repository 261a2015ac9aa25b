"""A row of the tables of starts: whether a model started at its first attempt, and its grant against the driver's count."""

from typing import Any

from benchmarks.engines_h200.daemon import mib


def start_row(name: str, done: dict[str, Any], driver: dict[str, int], shape: str | None = None) -> dict[str, Any]:
    """`done`: what `BenchmarkDaemon.apply` returned; `driver`: its `driver_bytes`."""
    instance = done["instances"].get(name, {})
    counted, granted = driver.get(str(instance.get("id"))), instance.get("memory_bytes")
    over = granted - counted if counted and granted else None
    within = over is not None and counted is not None and 0 <= over <= max(0.06 * counted, 512 << 20)
    return {
        "name": name,
        "shape": shape,
        "state": instance.get("state"),
        "first_attempt": not any(step.startswith(f"{name} missed") for step in done["steps"]),
        "seconds": done["ready_seconds"].get(name),
        "grant_mib": mib(granted),
        "driver_mib": mib(counted),
        "over_mib": mib(over),
        "over_percent": round(100 * over / counted, 2) if over is not None and counted else None,
        "within_bar": within,
        "kv_tokens": instance.get("kv_tokens"),
        "concurrency": instance.get("concurrency"),
        "stages": done["stages"].get(name),
        "reason": instance.get("reason"),
    }
