"""The tables, and how an older file becomes a newer one. A migration, once released, never changes.

Rolling back by one version must keep every model: a migration adds tables, and columns with a default, so that the version
before can still use the file. `READABLE_BY` is kept in the file; it rises only where that is impossible.
"""

import re

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE deployments (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE instances (
        id TEXT PRIMARY KEY,
        deployment TEXT NOT NULL,
        replica INTEGER NOT NULL CHECK (replica >= 0),
        state TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE grants (
        id TEXT PRIMARY KEY,
        instance_id TEXT NOT NULL,
        partition_id TEXT NOT NULL,
        memory_bytes INTEGER NOT NULL CHECK (memory_bytes > 0),
        body TEXT NOT NULL,
        charged_at_ms INTEGER NOT NULL,
        released_at_ms INTEGER
    ) STRICT;
    CREATE INDEX live_grants ON grants (partition_id) WHERE released_at_ms IS NULL;
    CREATE INDEX instance_grants ON grants (instance_id);
    CREATE TABLE operations (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE settings (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE claims (
        uid TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE retries (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
    """,
)
VERSION = len(MIGRATIONS)
TABLES = tuple(tuple(re.findall(r"CREATE TABLE (\w+)", migration)) for migration in MIGRATIONS)  # that each adds
READABLE_BY = 4  # the oldest version that can use a file of this one
