"""The log of a model's last failed start, kept after the instance and the daemon are gone."""

import contextlib
import shutil
from pathlib import Path

from aimgpu.domain import Instance
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.home import failed_log


def keep_failed_log(runs: Path, instance: Instance, last_lines: tuple[str, ...]) -> Path | None:
    """Where it is kept; None: it could not be written. `last_lines` stand in where the launcher keeps no file."""
    kept = failed_log(runs.parent, instance.deployment)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = runs / instance.id / LOG_NAME
        if log.is_file():
            shutil.copyfile(log, kept)
        else:
            kept.write_text("\n".join(last_lines) + "\n", encoding="utf-8")
        kept.chmod(0o600)
        return kept
    return None
