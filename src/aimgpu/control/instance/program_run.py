"""How the run of a program ended: its exit code, and the most memory that it held of what it was granted.

The last run of each name is kept beside the ledger, so that `aimgpu size --from-run` can propose a grant for the next one.
"""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from aimgpu.control.dependencies import Dependencies
from aimgpu.domain import Deployment, Instance, RestartPolicy, RunEnd
from aimgpu.engines.protocols import EndingEngine
from aimgpu.files import write_private
from aimgpu.home import last_run
from aimgpu.isolation.protocols import PeakMeter


def is_started_again(deployment: Deployment | None, end: RunEnd) -> bool:
    """By its restart policy."""
    program = deployment.overrides.program if deployment is not None else None
    if program is None or program.caller is not None or program.restart is RestartPolicy.NEVER:
        return False
    return program.restart is RestartPolicy.ALWAYS or end.exit_code != 0


def describe_end(end: RunEnd) -> str:
    """For people."""
    return "it ended" if end.exit_code is None else f"it ended with status {end.exit_code}"


def note_run(dependencies: Dependencies, instance: Instance) -> RunEnd:
    """Record its run before its grants are released, since what they count is lost with them."""
    engine, isolator = dependencies.engines.get(instance.engine), dependencies.isolator
    code = engine.exit_code(dependencies.runs / instance.id) if isinstance(engine, EndingEngine) else None
    peaks = [isolator.read_peak_bytes(one) if isinstance(isolator, PeakMeter) else None for one in instance.grants]
    end = RunEnd(
        exit_code=code,
        granted_bytes=min((grant.memory_bytes for grant in instance.grants), default=0),
        peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        seconds=max(0, dependencies.effects.wall_ms() - instance.began_ms) // 1000 if instance.began_ms is not None else 0,
    )
    if instance.is_program and instance.grants and instance.began_ms is not None:
        _keep(last_run(dependencies.runs.parent, instance.deployment), end)
    return end


def _keep(path: Path, end: RunEnd) -> None:
    """Where it cannot be written, the grant is freed all the same."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, json.dumps(asdict(end)))
