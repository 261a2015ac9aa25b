"""The private folder of an instance: its key, and what it is, so that it can be adopted even when the ledger is lost."""

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.domain import Deployment, Instance
from aimgpu.domain.codec import decode, encode
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.errors import LedgerFull
from aimgpu.files import write_private
from aimgpu.home import failed_log

_RECORD = "instance.json"
_KEY = "api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    deployment: Deployment
    instance: Instance


def prepare_run_directory(runs: Path, record: RunRecord) -> tuple[Path, str]:
    """Make the folder before the engine starts; returns it and the new API key."""
    folder = runs / record.instance.id
    key = secrets.token_hex(32)  # a command takes it as a word of its own: one that begins with "-" would be an option
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(folder / _KEY, key)
        write_private(folder / _RECORD, json.dumps(encode(record)))
    except OSError as error:
        raise LedgerFull(f"cannot write {folder}: {error.strerror}", hint="Free disk space or check permissions.") from error
    return folder, key


def update_run_record(runs: Path, instance: Instance) -> None:
    """What is needed to charge it again as it is now; if it cannot be written, the record of before stays."""
    before = read_run_record(runs, instance.id)
    if before is not None:
        with contextlib.suppress(OSError):
            write_private(runs / instance.id / _RECORD, json.dumps(encode(replace(before, instance=instance))))


def read_api_key(runs: Path, instance_id: str) -> str | None:
    try:
        return (runs / instance_id / _KEY).read_text()
    except OSError:
        return None


def read_run_record(runs: Path, instance_id: str) -> RunRecord | None:
    try:
        record: RunRecord = decode(RunRecord, json.loads((runs / instance_id / _RECORD).read_text()), "record")
    except (OSError, ValueError):
        return None
    return record


def remove_left_run_directories(runs: Path, read_known: Callable[[], Collection[str]]) -> None:
    """Those of instances that the ledger does not have any more: a key must not outlive its engine.

    The folders are listed before the ledger is read, so that one that is being made is never taken for one that was left.
    """
    try:
        listed = [folder.name for folder in runs.iterdir() if (folder / _KEY).exists() or (folder / _RECORD).exists()]
    except OSError:
        return
    if listed:
        for instance_id in set(listed).difference(read_known()):
            remove_run_directory(runs, instance_id)


def remove_run_directory(runs: Path, instance_id: str) -> None:
    shutil.rmtree(runs / instance_id, ignore_errors=True)


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
