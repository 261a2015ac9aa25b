"""The memory row of the isolation benchmark in which several greedy processes take all that they can."""

import json
from dataclasses import replace
from typing import Any

from aimgpu.domain import Priority
from aimgpu.units import GIB
from benchmarks.isolation_h200.bench import Bench, Member, describe_gate, driver_used_bytes, end, expect, send


def run_memory(bench: Bench, processes: int, cap_bytes: int) -> dict[str, Any]:
    """Several processes of one tenant take all they can, and one that comes late; the driver reports how much that was.

    Contexts count: the tenant may hold no more than its cap by the driver's own figure.
    """
    members = [
        Member(name="greedy", kind="memory", priority=Priority.LOW, cap_bytes=cap_bytes, seed=seed) for seed in range(processes)
    ]
    region = bench.make_region(members)
    before = driver_used_bytes()
    running = [bench.start(member, region) for member in members]
    try:
        for process in running:
            expect(process, "READY")
        contexts = driver_used_bytes() - before
        charged = sum(slot.context_bytes for use in region.read_use() for slot in use.processes) if region else 0
        for process in running:
            send(process, "GO 0")
        for process in running:
            expect(process, "HELD")
        held = driver_used_bytes() - before
        late = bench.start(replace(members[0], seed=processes), region)
        running.append(late)
        late_line = next((line for line in late.stdout or () if line.startswith("READY")), None)
        held = max(held, driver_used_bytes() - before)
        running.remove(late)
        late.kill()
        for process in running:
            send(process, "END")
        results = [json.loads(expect(process, "{")) for process in running]
    finally:
        end(running)
    allocated = sum(result["allocated"] for result in results)
    row = {
        "row": f"memory, {processes} processes of one tenant, cap {cap_bytes // GIB} GiB",
        "cap_bytes": cap_bytes,
        "allocated_bytes": allocated,
        "driver_bytes": held,  # contexts included
        "driver_context_bytes": contexts,
        "charged_context_bytes": charged,
        "late_process": "refused its context" if late_line is None else "started",
        "over_cap_bytes": max(0, allocated - cap_bytes, held - cap_bytes),
        "ways": {result["way"] + str(number): result["allocated"] for number, result in enumerate(results)},
        "shown_total_bytes": [result["total"] for result in results],
        "shown_properties_bytes": [result["properties_total"] for result in results],
    }
    if region is not None:
        row["gate"] = describe_gate(region)
        region.close()
    bench.rows.append(row)
    print(json.dumps(row), flush=True)
    return row
