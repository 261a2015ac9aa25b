"""The SQLite file of the ledger: opened, checked, migrated; its errors as ours."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from aimgpu.domain import Deployment, Grant, Instance, QueueSettings
from aimgpu.errors import LedgerCorrupt, LedgerFailed, LedgerFull
from aimgpu.ledger.mirror import Mirror, Retry
from aimgpu.ledger.rows import read_row
from aimgpu.ledger.schema import MIGRATIONS, READABLE_BY, VERSION

QUEUE = "queue"
_SCHEMA = "schema"
_PRIMARY_CODE = 0xFF  # of an extended result code
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def open_file(path: Path) -> tuple[sqlite3.Connection, Mirror]:
    """Open or make it, and read every row once, while it can still be set aside. Raises LedgerCorrupt."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with translated():
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        with translated():
            path.chmod(0o600)
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            _check(connection, path)
            _migrate(connection, path)
            return connection, _read(connection, path)
    except BaseException:
        connection.close()
        raise


def move_aside(path: Path) -> Path:
    """Keep the corrupt file and its WAL under a free name; evidence is never deleted."""
    number = next(n for n in range(1, 10_000) if not path.with_name(f"{path.name}.corrupt-{n}").exists())
    target = path.with_name(f"{path.name}.corrupt-{number}")
    for suffix in ("-wal", "-shm"):
        extra = path.with_name(path.name + suffix)
        if extra.exists():
            extra.rename(target.with_name(target.name + suffix))
    path.rename(target)
    return target


def read_grants(path: Path) -> tuple[Grant, ...]:
    """What is charged in the ledger of a daemon that is not there; none where it cannot be read. Changes nothing."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT body FROM grants WHERE released_at_ms IS NULL ORDER BY id").fetchall()
        return tuple(read_row(Grant, body, "grant").value for (body,) in rows)
    except (sqlite3.Error, ValueError):
        return ()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of SQLite, by their code, as errors that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & _PRIMARY_CODE
        if code == sqlite3.SQLITE_FULL:
            raise LedgerFull(f"the ledger cannot be written: {error}", hint="Free disk space; nothing was changed.") from error
        if code in _CORRUPT:
            raise LedgerCorrupt(f"the ledger is corrupt: {error}", hint="Restart: it is kept aside and rebuilt.") from error
        raise LedgerFailed(f"the ledger failed: {error}") from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise LedgerCorrupt(f"{path} is corrupt: {verdict}")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        if _readable_by(connection) > VERSION:
            raise LedgerFailed(
                f"{path} was written by a newer version (schema {found}, this one knows {VERSION})",
                hint="Upgrade aimgpu, or set AIMGPU_HOME to another folder.",
            )
        return  # one step back: what the newer version added is left as it is
    for number in range(found, VERSION):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
    if found < VERSION:
        body = json.dumps({"readable_by": READABLE_BY})
        connection.execute(
            "INSERT INTO settings (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
            (_SCHEMA, body),
        )


def _readable_by(connection: sqlite3.Connection) -> int:
    """The oldest version that can use this file, as its writer knew; its own where it does not say."""
    row = connection.execute("SELECT body FROM settings WHERE name = ?", (_SCHEMA,)).fetchone()
    own = int(connection.execute("PRAGMA user_version").fetchone()[0])
    try:
        return int(json.loads(row[0])["readable_by"]) if row else own
    except (ValueError, KeyError, TypeError):
        return own


def _read(connection: sqlite3.Connection, path: Path) -> Mirror:
    """A page may be whole and its text still not ours."""
    try:
        mirror = Mirror()
        for (body,) in connection.execute("SELECT body FROM deployments"):
            deployment = read_row(Deployment, body, "deployment")
            mirror.deployments[deployment.value.name] = deployment
        for (body,) in connection.execute("SELECT body FROM instances"):
            instance = read_row(Instance, body, "instance")
            mirror.instances[instance.value.id] = instance
        for body, released in connection.execute("SELECT body, released_at_ms FROM grants"):
            grant = read_row(Grant, body, "grant")
            if released is None:
                mirror.grants[grant.value.id] = grant
        for (body,) in connection.execute("SELECT body FROM retries"):
            retry = read_row(Retry, body, "retry")
            mirror.retries[retry.value.deployment] = retry
        for (body,) in connection.execute("SELECT body FROM settings WHERE name = ?", (QUEUE,)):
            read_row(QueueSettings, body, "settings")
        for (body,) in connection.execute("SELECT body FROM operations UNION ALL SELECT body FROM claims"):
            json.loads(body)
    except ValueError as error:
        raise LedgerCorrupt(f"{path} holds a row that cannot be read: {error}") from error
    return mirror
