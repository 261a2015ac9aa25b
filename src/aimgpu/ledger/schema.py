"""The tables, and the number of their form.

Two builds of one number use each other's files: fields that one of them does not know are kept (`ledger.rows`), so a build may
add a field that has a default. Any other change of the tables or of what is stored in them raises SCHEMA. A file of another
number is refused and left as it is, until `aimgpu down` sets it aside.
"""

import re

SCHEMA = 5
CREATE = """
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
    CREATE TABLE settings (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE claims (
        uid TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE retries (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
"""
TABLES = tuple(re.findall(r"CREATE TABLE (\w+)", CREATE))
