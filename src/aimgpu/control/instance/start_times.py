"""How long models took to start, kept across daemons: the estimate that a later start shows."""

import contextlib
import json
from pathlib import Path

from aimgpu.domain import Instance
from aimgpu.files import locked, read_bounded, write_private

_LARGEST_FILE = 1 << 20
_KEPT_MODELS = 500
_LEAST_SECONDS = 5  # less needs no estimate


def expected_seconds(runs: Path, instance: Instance) -> int | None:
    """What the last start of this model with this engine took; None: never seen, or not worth a word."""
    milliseconds = _read(_path(runs)).get(_key(instance))
    seconds = round(milliseconds / 1000) if milliseconds else 0
    return seconds if seconds >= _LEAST_SECONDS else None


def note_start(runs: Path, instance: Instance) -> None:
    """Where it cannot be written, the next start has no estimate."""
    if instance.load_ms is None:
        return
    path = _path(runs)
    with contextlib.suppress(OSError), locked(path):
        known = _read(path)
        known.pop(_key(instance), None)  # the newest last
        known[_key(instance)] = instance.load_ms
        write_private(path, json.dumps(dict(list(known.items())[-_KEPT_MODELS:])))


def _path(runs: Path) -> Path:
    return runs.parent / "start-times.json"


def _key(instance: Instance) -> str:
    return f"{instance.engine} {instance.launcher} {instance.model}"


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(read_bounded(path, _LARGEST_FILE))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}
