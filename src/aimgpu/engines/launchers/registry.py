"""What a launcher started, one small file per instance, written before the engine may run."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aimgpu.domain import ProcessIdentity
from aimgpu.errors import EngineFailed, InvalidInput
from aimgpu.files import write_private
from aimgpu.procfs import Identified

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedProcess:
    """What is recorded of a process that was started."""

    instance_id: str
    process: ProcessIdentity
    run_directory: Path


def identify(process: Identified) -> ProcessIdentity:
    """As the ledger keeps it."""
    return ProcessIdentity(pid=process.pid, start_ticks=process.start_ticks, boot_id=process.boot_id)


class Registry:
    """One file per started process, so that a later daemon finds it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, started: StartedProcess) -> None:
        """Whole or not at all; a full disk is an error before anything runs."""
        path = self._path(started.instance_id)
        content = {
            "instance": started.instance_id,
            "pid": started.process.pid,
            "start_ticks": started.process.start_ticks,
            "boot_id": started.process.boot_id,
            "run_directory": str(started.run_directory),
        }
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, json.dumps(content))
        except OSError as error:
            raise EngineFailed(
                f"cannot note the process of {started.instance_id} in {self._folder}: {error.strerror}",
                hint="Free some disk space, or choose another folder with AIMGPU_HOME.",
            ) from error

    def read(self, instance_id: str) -> StartedProcess | None:
        """The record of one instance."""
        return _parse(self._path(instance_id))

    def read_all(self) -> Iterator[StartedProcess]:
        """The records of all instances."""
        for path in sorted(self._folder.glob("*.json")):
            if started := _parse(path):
                yield started

    def remove(self, instance_id: str) -> None:
        """Forget an instance that has ended."""
        self._path(instance_id).unlink(missing_ok=True)

    def _path(self, instance_id: str) -> Path:
        if not _SAFE_ID.fullmatch(instance_id):
            raise InvalidInput(f"{instance_id[:140]!r} is not an instance id", hint="Letters, digits, '.', '_' and '-'.")
        return self._folder / f"{instance_id}.json"


def _parse(path: Path) -> StartedProcess | None:
    """None for a file that is gone or damaged: the marks in the processes' environment still show it."""
    try:
        content = json.loads(path.read_bytes())
        process = ProcessIdentity(
            pid=int(content["pid"]), start_ticks=int(content["start_ticks"]), boot_id=str(content["boot_id"])
        )
        return StartedProcess(instance_id=content["instance"], process=process, run_directory=Path(content["run_directory"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
