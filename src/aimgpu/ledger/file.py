"""The SQLite file of the ledger: opened, checked, made; its errors as ours."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from aimgpu.domain import Deployment, Grant, Instance, QueueSettings
from aimgpu.errors import LedgerCorrupt, LedgerFailed, LedgerFull, OtherLedgerSchema
from aimgpu.ledger.rows import read_row
from aimgpu.ledger.schema import CREATE, SCHEMA, TABLES
from aimgpu.ledger.state import LedgerState, Retry

QUEUE = "queue"
BUSY_MILLISECONDS = 5000  # that a write waits for another program
_PRIMARY_CODE = 0xFF  # of an extended result code
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_SET_ASIDE = "Restart: it is kept aside and rebuilt."
_UNDECODABLE = "Could not decode to UTF-8"  # Python's own error, without a code of SQLite
_CLOSED = "Check that this user can write the folder and the file, or set AIMGPU_HOME to another folder."
_HINTS = {
    sqlite3.SQLITE_BUSY: "Another program holds it: end that, then try again.",
    sqlite3.SQLITE_LOCKED: "Another program holds it: end that, then try again.",
    sqlite3.SQLITE_READONLY: _CLOSED,
    sqlite3.SQLITE_CANTOPEN: _CLOSED,
    sqlite3.SQLITE_PERM: _CLOSED,
    sqlite3.SQLITE_IOERR: "The disk failed: look at the kernel log (dmesg).",
}


def open_file(path: Path) -> tuple[sqlite3.Connection, LedgerState]:
    """Open or make it, and read every row once, while it can still be set aside.

    Raises OtherLedgerSchema, LedgerCorrupt or LedgerFailed.
    """
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
            if not _schema_of(connection):
                connection.executescript(f"BEGIN IMMEDIATE; {CREATE} PRAGMA user_version = {SCHEMA}; COMMIT;")
            return connection, _read(connection, path)
    except BaseException:
        connection.close()
        raise


def move_aside(path: Path, mark: str = "corrupt") -> Path:
    """Keep the file and its WAL under a free name; evidence is never deleted."""
    number = next(n for n in range(1, 10_000) if not path.with_name(f"{path.name}.{mark}-{n}").exists())
    target = path.with_name(f"{path.name}.{mark}-{number}")
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
    except UnicodeDecodeError as error:  # a name in the file's own tables
        raise LedgerCorrupt(f"{which} holds damaged text: {error}", hint=_SET_ASIDE) from error
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & _PRIMARY_CODE
        if _UNDECODABLE in str(error):
            raise LedgerCorrupt(f"{which} holds damaged text: {error}", hint=_SET_ASIDE) from error
        if code == sqlite3.SQLITE_FULL:
            raise LedgerFull(f"{which} cannot be written: {error}", hint="Free disk space; nothing was changed.") from error
        if code in _CORRUPT:
            raise LedgerCorrupt(f"{which} is corrupt: {error}", hint=_SET_ASIDE) from error
        raise LedgerFailed(f"{which} failed: {error}", hint=_HINTS.get(code)) from error


def has_other_schema(path: Path) -> bool:
    """Whether a build with other tables wrote this ledger; False where there is none, or it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return _schema_of(connection) not in (0, SCHEMA)
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Check, before anything is written, that the file is whole and has the tables of its schema."""
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise LedgerCorrupt(f"{path} is corrupt: {verdict}")
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    schema = _schema_of(connection)
    if schema not in (0, SCHEMA):
        raise OtherLedgerSchema(
            f"another build of aimgpu wrote {path} (schema {schema}; this build reads {SCHEMA})",
            hint="`aimgpu down` stops what that build left running and sets the ledger aside. `aimgpu up` makes a new one.",
        )
    missing = [name for name in TABLES if name not in there] if schema else []
    if missing:
        raise LedgerCorrupt(f"{path} has no table {', '.join(missing)}")
    if there and not schema:
        raise LedgerCorrupt(f"{path} is the database of another program")


def _schema_of(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _read(connection: sqlite3.Connection, path: Path) -> LedgerState:
    """A page may be whole and its text still not ours."""
    try:
        state = LedgerState()
        for (body,) in connection.execute("SELECT body FROM deployments"):
            deployment = read_row(Deployment, body, "deployment")
            state.deployments[deployment.value.name] = deployment
        for (body,) in connection.execute("SELECT body FROM instances"):
            instance = read_row(Instance, body, "instance")
            state.instances[instance.value.id] = instance
        for body, released in connection.execute("SELECT body, released_at_ms FROM grants"):
            grant = read_row(Grant, body, "grant")
            if released is None:
                state.grants[grant.value.id] = grant
        for (body,) in connection.execute("SELECT body FROM retries"):
            retry = read_row(Retry, body, "retry")
            state.retries[retry.value.deployment] = retry
        for (body,) in connection.execute("SELECT body FROM settings WHERE name = ?", (QUEUE,)):
            read_row(QueueSettings, body, "settings")
        for (body,) in connection.execute("SELECT body FROM operations UNION ALL SELECT body FROM claims"):
            json.loads(body)
    except ValueError as error:
        raise LedgerCorrupt(f"{path} holds a row that cannot be read: {error}") from error
    return state
