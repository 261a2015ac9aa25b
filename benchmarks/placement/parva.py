"""The ParvaGPU scenarios (SC'24 artifact): the fewest A100-80GB that serve every rate within its latency limit."""

import csv
from pathlib import Path
from typing import Any

from aimgpu.hardware.simulated import SimulatedHardware
from benchmarks.placement.rates import RatedService, fewest_devices

MICRO = 1_000_000
MOST_PROCESSES = 3
PUBLISHED = (2, 3, 5, 7, 13, 16)


def layouts() -> list[dict[str, int]]:
    """The Layouts of a simulated A100-80, by the compute slices of their instances, as the artifact names them."""
    device = SimulatedHardware([("A100-80", 1)]).read_devices()[0]
    found = []
    for layout in device.layouts:
        kinds = [partition.kind for partition in layout.partitions]
        if layout.name != "whole" and not any(kind == "1g.20gb" for kind in kinds):
            found.append({size: sum(kind.startswith(f"{size}g") for kind in kinds) for size in "12347"})
    return [dict(shape) for shape in sorted({tuple(sorted(each.items())) for each in found})]


def scenarios(folder: Path) -> list[list[RatedService]]:
    models = sorted(path.stem for path in folder.glob("*.csv") if "SLO" not in path.name)
    profiles = {model: [tuple(map(float, row)) for row in _rows(folder / f"{model}.csv")[1:]] for model in models}
    rates, limits = _rows(folder / "SLO_req_rate.csv"), _rows(folder / "SLO_latency.csv")
    return [
        [
            _service(model, float(rate), float(limit), profiles[model])
            for model, rate, limit in zip(models, rate_row, limit_row, strict=True)
            if rate != "N/A"
        ]
        for rate_row, limit_row in zip(rates, limits, strict=True)
    ]


def run(folder: Path) -> list[dict[str, Any]]:
    shapes = layouts()
    rows = []
    for number, services in enumerate(scenarios(folder), start=1):
        plan = fewest_devices(shapes, services)
        served = {
            service.name: sum(service.throughput[kind] * count for kind, count in plan.partitions[service.name].items())
            for service in services
        }
        if any(served[service.name] < service.rate for service in services):
            raise AssertionError(f"scenario {number}: a rate is not met")
        rows.append(
            {
                "scenario": number,
                "services": len(services),
                "devices": plan.devices,
                "bound": round(plan.bound, 3),
                "proven_best": plan.proven_best,
                "published": PUBLISHED[number - 1],
                "layouts": [dict(layout) for layout in plan.layouts],
            }
        )
    return rows


def _service(name: str, rate: float, limit_ms: float, profile: list[tuple[float, ...]]) -> RatedService:
    """The artifact's rule: latency below 0.9 * limit / 2, at most three processes an instance."""
    best: dict[str, int] = {}
    for size, _, processes, throughput, latency in profile:
        if processes <= MOST_PROCESSES and 0 < latency * 1000 < limit_ms / 2 * 0.9:
            kind = str(int(size))
            best[kind] = max(best.get(kind, 0), int(throughput * processes * MICRO))
    return RatedService(name=name, rate=-int(-rate * MICRO // 1), throughput=best)


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row]
