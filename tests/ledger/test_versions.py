"""Ledgers of earlier and later versions: migrated up, and after a step back every model and every unknown field is kept.

`files/ledger-1` and `-2` were written by the versions that had these schemas: two models, two instances, a mechanism that was
still one text, an operation that was cut short, and (from 2 on) the bounds of the queue.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aimgpu.domain import Fraction, InstanceState, QueueSettings, SleepFootprint
from aimgpu.ledger import Ledger, Retry
from aimgpu.ledger.schema import READABLE_BY, VERSION

FILES = Path(__file__).parent / "files"


def opened(tmp_path: Path, version: int) -> Ledger:
    shutil.copy(FILES / f"ledger-{version}.sqlite3", tmp_path / "ledger.sqlite3")
    return Ledger.open(tmp_path / "ledger.sqlite3")


@pytest.mark.parametrize("version", [1, 2])
def test_a_ledger_of_an_earlier_version_keeps_every_model(tmp_path: Path, version: int) -> None:
    ledger = opened(tmp_path, version)
    assert ledger.set_aside is None
    chat, code = ledger.deployments()
    assert (chat.name, chat.keep_seconds, chat.concurrency) == ("chat", 600, 4)
    assert (code.name, code.ask.want, code.replicas) == ("code", Fraction(ppm=500_000), 2)
    first, second = ledger.instances()
    assert (first.state, first.sleep_footprint) == (InstanceState.READY, SleepFootprint(device_bytes=1 << 20))
    assert [grant.mechanisms for one in (first, second) for grant in one.grants] == [("dmem", "interposer"), ()]
    assert [operation.kind for operation in ledger.operations()] == ["partition"]
    assert ledger.queue() == (QueueSettings(per_gpu=3) if version > 1 else QueueSettings())
    ledger.keep_retry(Retry(deployment="chat", reason="it died"))
    ledger.close()
    again = Ledger.open(tmp_path / "ledger.sqlite3")
    assert again.set_aside is None
    assert again.retry("chat") == Retry(deployment="chat", reason="it died")
    again.close()


def write_as_next_version(path: Path) -> None:
    """What the next version may do: add tables, columns with a default, and fields, at any depth."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            """
            CREATE TABLE placements (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
            INSERT INTO placements VALUES ('chat', 'pinned');
            ALTER TABLE instances ADD COLUMN generation INTEGER NOT NULL DEFAULT 7;
            """
        )
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
        for table, fields in (
            ("deployments", {"colour": "blue", "ask": {"mood": "calm"}}),
            ("instances", {"heat": 3, "rest": {"swap_bytes": 5}}),
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


def test_after_a_step_back_every_model_is_there_and_what_the_newer_version_wrote_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    opened(tmp_path, 2).close()
    write_as_next_version(path)
    ledger = Ledger.open(path)
    assert ledger.set_aside is None
    assert [item.name for item in ledger.deployments()] == ["chat", "code"]
    chat = ledger.deployments()[0]
    ledger.want(replace(chat, concurrency=8))
    first, second = ledger.instances()
    ledger.update(replace(first, state=InstanceState.LOADING))
    ledger.note_enforcement(replace(first.grants[0], mechanisms=("interposer",)))
    ledger.charge(
        replace(second, id="new", grants=(replace(second.grants[0], id="new/0", instance_id="new"),)),
        capacity={"gpu0/spx-0": 192 << 30},
    )
    ledger.close()
    assert {body["name"]: (body["colour"], body["ask"]["mood"]) for body in bodies(path, "deployments")} == {
        "chat": ("blue", "calm"),
        "code": ("blue", "calm"),
    }
    found = {body["id"]: body for body in bodies(path, "instances")}
    assert (found[first.id]["heat"], found[first.id]["sleep_footprint"]["swap_bytes"]) == (3, 5)
    assert "heat" not in found["new"]
    grants = {body["id"]: body for body in bodies(path, "grants")}
    assert (grants[first.grants[0].id]["watts"], grants[first.grants[0].id]["mechanisms"]) == (300, ["interposer"])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == VERSION + 1
        assert connection.execute("SELECT body FROM placements").fetchall() == [("pinned",)]
        assert connection.execute("SELECT DISTINCT generation FROM instances").fetchall() == [(7,)]


def test_the_file_records_the_oldest_version_that_can_use_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    opened(tmp_path, 1).close()
    with closing(sqlite3.connect(path)) as connection:
        (body,) = connection.execute("SELECT body FROM settings WHERE name = 'schema'").fetchone()
    assert json.loads(body) == {"readable_by": READABLE_BY}
    assert READABLE_BY <= VERSION
