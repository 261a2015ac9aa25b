"""The ledger of a daemon, read by another process without changing anything or waiting for it."""

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from aimgpu.domain import Deployment, Grant, Instance
from aimgpu.ledger.file import read_grants
from aimgpu.ledger.rows import read_row


def read_instances(path: Path) -> tuple[Instance, ...]:
    """Every instance with the grants that it holds; none where there is no ledger, or it cannot be read."""
    held: dict[str, list[Grant]] = {}
    for grant in read_grants(path):
        held.setdefault(grant.instance_id, []).append(grant)
    try:
        found = [read_row(Instance, body, "instance").value for body in _bodies(path, "instances")]
    except ValueError:
        return ()
    return tuple(replace(instance, grants=tuple(held.get(instance.id, ()))) for instance in found)


def read_deployments(path: Path) -> tuple[Deployment, ...]:
    """What is wanted; nothing where there is no ledger, or it cannot be read."""
    try:
        return tuple(read_row(Deployment, body, "deployment").value for body in _bodies(path, "deployments"))
    except ValueError:
        return ()


def _bodies(path: Path, table: str) -> Iterable[str]:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return [body for (body,) in connection.execute(f"SELECT body FROM {table} ORDER BY rowid")]  # noqa: S608 -- ours
    except sqlite3.Error:
        return ()
