"""The private folder of an instance: its key, and what it is, so that it can be adopted even when the ledger is lost."""

import contextlib
import json
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.domain import Deployment, Instance
from aimgpu.domain.codec import decode, encode
from aimgpu.errors import LedgerFull
from aimgpu.files import write_private

_RECORD = "instance.json"
_KEY = "api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    deployment: Deployment
    instance: Instance


def prepare_run_directory(runs: Path, record: RunRecord) -> tuple[Path, str]:
    """Make the folder before the engine starts; returns it and the new API key."""
    folder = runs / record.instance.id
    key = secrets.token_urlsafe(32)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(folder / _KEY, key)
        write_private(folder / _RECORD, json.dumps(encode(record)))
    except OSError as error:
        raise LedgerFull(f"cannot write {folder}: {error.strerror}", hint="Free disk space or check permissions.") from error
    return folder, key


def update_run_record(runs: Path, instance: Instance) -> None:
    """What is needed to charge it again as it is now; where it cannot be written, the record of before stays."""
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


def remove_run_directory(runs: Path, instance_id: str) -> None:
    shutil.rmtree(runs / instance_id, ignore_errors=True)
