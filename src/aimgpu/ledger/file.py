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
from aimgpu.ledger.schema import MIGRATIONS, READABLE_BY, TABLES, VERSION

QUEUE = "queue"
_SCHEMA = "schema"
BUSY_MILLISECONDS = 5000  # that a write waits for another program
_PRIMARY_CODE = 0xFF  # of an extended result code
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_CLOSED = "Check that this user can write the folder and the file, or set AIMGPU_HOME to another folder."
_HINTS = {
    sqlite3.SQLITE_BUSY: "Another program holds it: end that, then try again.",
    sqlite3.SQLITE_LOCKED: "Another program holds it: end that, then try again.",
    sqlite3.SQLITE_READONLY: _CLOSED,
    sqlite3.SQLITE_CANTOPEN: _CLOSED,
    sqlite3.SQLITE_PERM: _CLOSED,
    sqlite3.SQLITE_IOERR: "The disk failed: look at the kernel log (dmesg).",
}


def open_file(path: Path) -> tuple[sqlite3.Connection, Mirror]:
    """Open or make it, and read every row once, while it can still be set aside. Raises LedgerCorrupt or LedgerFailed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError as error:
        raise LedgerFailed(f"the ledger {path} cannot be opened: {error.strerror}", hint=_CLOSED) from error
    with translated(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        with translated(path):
            connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
            _check(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
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
def translated(path: Path | None = None) -> Iterator[None]:
    """Errors of SQLite, by their code, as errors that say what to do."""
    which = "the ledger" if path is None else f"the ledger {path}"
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & _PRIMARY_CODE
        if code == sqlite3.SQLITE_FULL:
            raise LedgerFull(f"{which} cannot be written: {error}", hint="Free disk space; nothing was changed.") from error
        if code in _CORRUPT:
            raise LedgerCorrupt(f"{which} is corrupt: {error}", hint="Restart: it is kept aside and rebuilt.") from error
        raise LedgerFailed(f"{which} failed: {error}", hint=_HINTS.get(code)) from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Before anything is written to it: it is whole, and has the tables of the version that it says it has."""
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise LedgerCorrupt(f"{path} is corrupt: {verdict}")
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    missing = [name for number in range(min(version, VERSION)) for name in TABLES[number] if name not in there]
    if missing:
        raise LedgerCorrupt(f"{path} has no table {', '.join(missing)}")
    if there and not version:
        raise LedgerCorrupt(f"{path} is the database of another program")


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
