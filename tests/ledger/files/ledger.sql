BEGIN TRANSACTION;
CREATE TABLE claims (
        uid TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
CREATE TABLE deployments (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "deployments" VALUES('chat','{"name": "chat", "model": "org/chat", "ask": {"name": "chat", "want": {"auto": {}}, "footprint_bytes": null, "least_bytes": null, "divided": [], "devices": 1, "compute_ppm": null, "isolation": "none", "priority": "medium", "products": [], "refused_products": [], "vendor": null, "refused_vendor": null, "partition_id": null, "spread": "pack", "with_deployments": [], "not_with_deployments": [], "deployment": null, "cpu_millis": 0, "host_memory_bytes": 0, "pinned": false}, "engine": null, "precision": null, "context_tokens": null, "concurrency": 4, "objective": null, "replicas": 1, "keep_seconds": 600, "sleeps_in_place": true, "launcher": "process", "watchdog": "warn", "sharing": "strict", "overrides": {"arguments": [], "environment": [], "secrets": [], "image": null}, "resized_bytes": null}');
INSERT INTO "deployments" VALUES('code','{"name": "code", "model": "org/code", "ask": {"name": "code", "want": {"fraction": {"ppm": 500000}}, "footprint_bytes": null, "least_bytes": null, "divided": [], "devices": 1, "compute_ppm": null, "isolation": "none", "priority": "medium", "products": [], "refused_products": [], "vendor": null, "refused_vendor": null, "partition_id": null, "spread": "pack", "with_deployments": [], "not_with_deployments": [], "deployment": null, "cpu_millis": 0, "host_memory_bytes": 0, "pinned": false}, "engine": null, "precision": null, "context_tokens": null, "concurrency": null, "objective": null, "replicas": 2, "keep_seconds": null, "sleeps_in_place": true, "launcher": "process", "watchdog": "warn", "sharing": "strict", "overrides": {"arguments": [], "environment": [], "secrets": [], "image": null}, "resized_bytes": null}');
CREATE TABLE grants (
        id TEXT PRIMARY KEY,
        instance_id TEXT NOT NULL,
        partition_id TEXT NOT NULL,
        memory_bytes INTEGER NOT NULL CHECK (memory_bytes > 0),
        body TEXT NOT NULL,
        charged_at_ms INTEGER NOT NULL,
        released_at_ms INTEGER
    ) STRICT;
INSERT INTO "grants" VALUES('chat-0-a/0','chat-0-a','gpu0/spx-0',8589934592,'{"id": "chat-0-a/0", "instance_id": "chat-0-a", "deployment": "chat", "node": "localhost", "device_id": "gpu0", "partition_id": "gpu0/spx-0", "memory_bytes": 8589934592, "compute_ppm": null, "priority": "medium", "level": "driver", "exclusive": false, "mechanisms": ["dmem", "interposer"]}',1700000000000,NULL);
INSERT INTO "grants" VALUES('code-0-b/0','code-0-b','gpu0/spx-0',8589934592,'{"id": "code-0-b/0", "instance_id": "code-0-b", "deployment": "code", "node": "localhost", "device_id": "gpu0", "partition_id": "gpu0/spx-0", "memory_bytes": 8589934592, "compute_ppm": null, "priority": "medium", "level": "driver", "exclusive": false, "mechanisms": []}',1700000000000,NULL);
CREATE TABLE instances (
        id TEXT PRIMARY KEY,
        deployment TEXT NOT NULL,
        replica INTEGER NOT NULL CHECK (replica >= 0),
        state TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "instances" VALUES('chat-0-a','chat',0,'ready','{"id": "chat-0-a", "deployment": "chat", "replica": 0, "model": "org/chat", "engine": "vllm", "launcher": "process", "state": "ready", "revision": null, "reason": null, "last_lines": [], "process": null, "endpoint": null, "grants": [], "percent": null, "sleep_footprint": {"device_bytes": 1048576, "host_bytes": 0}, "awake_slots": [], "load_ms": null, "wake_ms": null, "concurrency": null, "kv_tokens": null, "kv_cache_bytes": null, "context_tokens": null, "sized_bytes": null, "in_host_memory": false, "stage": null}');
INSERT INTO "instances" VALUES('code-0-b','code',0,'loading','{"id": "code-0-b", "deployment": "code", "replica": 0, "model": "org/code", "engine": "vllm", "launcher": "process", "state": "loading", "revision": null, "reason": null, "last_lines": [], "process": null, "endpoint": null, "grants": [], "percent": null, "sleep_footprint": {"device_bytes": 1048576, "host_bytes": 0}, "awake_slots": [], "load_ms": null, "wake_ms": null, "concurrency": null, "kv_tokens": null, "kv_cache_bytes": null, "context_tokens": null, "sized_bytes": null, "in_host_memory": false, "stage": null}');
CREATE TABLE operations (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "operations" VALUES(1,'partition','{"device": "gpu0"}');
CREATE TABLE retries (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "retries" VALUES('code','{"deployment": "code", "reason": "it died", "failures": 0, "last_failure_ms": 0, "retry_at_ms": null, "exhausted": false}');
CREATE TABLE settings (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "settings" VALUES('queue','{"per_gpu": 3, "longest_wait_ms": {"high": null, "medium": null, "low": null}, "most_queued": {"high": null, "medium": null, "low": null}}');
CREATE INDEX live_grants ON grants (partition_id) WHERE released_at_ms IS NULL;
CREATE INDEX instance_grants ON grants (instance_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('operations',1);
COMMIT;
PRAGMA user_version = 5;
