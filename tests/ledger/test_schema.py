"""Ledgers of other builds: of the same schema every model and every unknown field is kept, of another one nothing is touched.

`files/ledger.sql` was written by the first build of this schema. Where a change makes it unreadable, raise SCHEMA and record it
again with `python -m tests.ledger.test_schema`.
"""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Fraction,
    Grant,
    Instance,
    InstanceState,
    Level,
    Priority,
    QueueSettings,
    SleepFootprint,
)
from aimgpu.errors import OtherLedgerSchema
from aimgpu.ledger import Ledger, Retry, has_other_schema
from aimgpu.ledger.schema import SCHEMA, TABLES

RECORDED = Path(__file__).parent / "files" / "ledger.sql"
PARTITION, GIB = "gpu0/spx-0", 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection:
        connection.executescript(RECORDED.read_text())
    return tmp_path / "ledger.sqlite3"


def held(instance_id: str, *mechanisms: str) -> Grant:
    return Grant(
        id=f"{instance_id}/0",
        instance_id=instance_id,
        deployment=instance_id.split("-", maxsplit=1)[0],
        node="localhost",
        device_id="gpu0",
        partition_id=PARTITION,
        memory_bytes=8 * GIB,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.DRIVER,
        mechanisms=mechanisms,
    )


CHAT = Deployment(name="chat", model="org/chat", ask=Ask(name="chat", want=Auto()), keep_seconds=600, concurrency=4)
CODE = Deployment(name="code", model="org/code", ask=Ask(name="code", want=Fraction(ppm=500_000)), replicas=2)
READY = Instance(
    id="chat-0-a",
    deployment="chat",
    replica=0,
    model="org/chat",
    engine="vllm",
    launcher="process",
    state=InstanceState.READY,
    grants=(held("chat-0-a", "dmem", "interposer"),),
    sleep_footprint=SleepFootprint(device_bytes=1 << 20),
)
LOADING = replace(
    READY, id="code-0-b", deployment="code", model="org/code", state=InstanceState.LOADING, grants=(held("code-0-b"),)
)


def fill(ledger: Ledger) -> None:
    ledger.want(CHAT, CODE)
    ledger.charge(READY, LOADING, capacity={PARTITION: 192 * GIB})
    ledger.begin("partition", {"device": "gpu0"})
    ledger.keep_queue(QueueSettings(per_gpu=3))
    ledger.keep_retry(Retry(deployment="code", reason="it died"))


def test_the_ledger_of_another_build_of_this_schema_keeps_everything(path: Path) -> None:
    with closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is None
        assert ledger.deployments() == (CHAT, CODE)
        assert ledger.instances() == (READY, LOADING)
        assert [operation.kind for operation in ledger.operations()] == ["partition"]
        assert ledger.queue() == QueueSettings(per_gpu=3)
        assert ledger.retry("code") == Retry(deployment="code", reason="it died")


def test_this_build_makes_the_tables_that_are_recorded(path: Path, tmp_path: Path) -> None:
    """Other tables are another schema: raise SCHEMA with them."""
    made = tmp_path / "made.sqlite3"
    Ledger.open(made).close()
    assert structure(made) == structure(path)
    assert {name for kind, name, _ in structure(made) if kind == "table"} >= set(TABLES)


def structure(path: Path) -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(str(kind), str(name), " ".join(str(sql).split())) for kind, name, sql in rows}


def add_fields(path: Path) -> None:
    """What another build of this schema may do: write fields that this one does not know, at any depth."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, fields in (
            ("deployments", {"colour": "blue", "ask": {"mood": "calm"}}),
            ("instances", {"heat": 3, "sleep_footprint": {"swap_bytes": 5}}),
            ("grants", {"watts": 300}),
        ):
            for row, body in connection.execute(f"SELECT rowid, body FROM {table}").fetchall():  # noqa: S608 - ours
                text = json.dumps(merged(json.loads(body), fields))
                connection.execute(f"UPDATE {table} SET body = ? WHERE rowid = ?", (text, row))  # noqa: S608 - ours


def merged(body: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    for name, value in fields.items():
        body[name] = merged(body[name], value) if isinstance(value, dict) else value
    return body


def bodies(path: Path, table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        return [json.loads(body) for (body,) in connection.execute(f"SELECT body FROM {table}")]  # noqa: S608 - ours


def test_what_another_build_of_this_schema_wrote_is_kept_through_changes(path: Path) -> None:
    add_fields(path)
    with closing(Ledger.open(path)) as ledger:
        assert ledger.set_aside is None
        chat = ledger.deployments()[0]
        ledger.want(replace(chat, concurrency=8))
        first, second = ledger.instances()
        ledger.update(replace(first, state=InstanceState.LOADING))
        ledger.note_enforcement(replace(first.grants[0], mechanisms=("interposer",)))
        ledger.charge(
            replace(second, id="new", grants=(replace(second.grants[0], id="new/0", instance_id="new"),)),
            capacity={PARTITION: 192 * GIB},
        )
    assert {body["name"]: (body["colour"], body["ask"]["mood"]) for body in bodies(path, "deployments")} == {
        "chat": ("blue", "calm"),
        "code": ("blue", "calm"),
    }
    found = {body["id"]: body for body in bodies(path, "instances")}
    assert (found[first.id]["heat"], found[first.id]["sleep_footprint"]["swap_bytes"]) == (3, 5)
    assert "heat" not in found["new"]
    grants = {body["id"]: body for body in bodies(path, "grants")}
    assert (grants[first.grants[0].id]["watts"], grants[first.grants[0].id]["mechanisms"]) == (300, ["interposer"])


@pytest.mark.parametrize("schema", [1, SCHEMA - 1, SCHEMA + 1])
def test_the_ledger_of_another_schema_is_left_as_it_is_and_the_way_out_is_named(path: Path, schema: int) -> None:
    assert not has_other_schema(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema}")
    before = path.read_bytes()
    assert has_other_schema(path)
    with pytest.raises(OtherLedgerSchema, match=f"schema {schema}; this build reads {SCHEMA}") as caught:
        Ledger.open(path)
    assert "`aimgpu down`" in str(caught.value.hint)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.corrupt-*"))


def test_what_is_no_ledger_has_no_other_schema(tmp_path: Path) -> None:
    garbage, fresh = tmp_path / "garbage", tmp_path / "fresh"
    garbage.write_bytes(b"\x00" * 5000)
    Ledger.open(fresh).close()
    assert [has_other_schema(path) for path in (garbage, fresh, tmp_path / "absent", tmp_path)] == [False] * 4


def _record() -> None:
    path = RECORDED.with_suffix(".sqlite3")
    with closing(Ledger.open(path, now_ms=lambda: 1_700_000_000_000)) as ledger:
        fill(ledger)
    with closing(sqlite3.connect(path)) as connection:
        lines = [*connection.iterdump(), f"PRAGMA user_version = {SCHEMA};"]
    RECORDED.write_text("\n".join(lines) + "\n")
    for each in path.parent.glob(path.name + "*"):
        each.unlink()


if __name__ == "__main__":
    _record()
