"""What a watch of our client does about gaps, where the server refuses to go on, and how it notices a server that is gone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving

from aimgpu.kubernetes.api import client as api_client
from aimgpu.kubernetes.api.client import WatchEvent
from aimgpu.kubernetes.api.resources import CONFIG_MAPS

MAPS = "/api/v1/namespaces/default/configmaps"


def config_map(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": {}}


def cut(api: ApiServer, *statuses: int) -> None:
    """End the watches, without forgetting what was, and answer the next requests with these."""
    left = list(statuses)
    api.fault = lambda _method, _path: left.pop(0) if left else None
    api.store.oldest += 1
    api.put(f"{MAPS}/new", config_map("new"))


async def seen(watch: AsyncIterator[WatchEvent], count: int) -> list[str]:
    async with asyncio.timeout(300):
        found = [await anext(watch) for _ in range(count)]
    return [event.type + " " + event.object.get("metadata", {}).get("name", "") for event in found]


@pytest.mark.parametrize(
    ("statuses", "resync_seconds", "expected"),
    [
        ((), None, ["ADDED new"]),
        ((500, 503), None, ["ADDED new"]),  # taken up where it was
        ((410,), None, ["ADDED new", "SYNCED "]),
        ((504, 500), None, ["ADDED new", "SYNCED "]),  # a version of the future: etcd was restored from a backup
        ((404, 404, 404), None, ["ABSENT ", "ADDED new", "SYNCED "]),  # the kind was removed and made again
        ((500,), 0.0, ["ADDED new", "SYNCED "]),
        ((500,), 3600.0, ["ADDED new"]),
    ],
)
def test_after_a_gap_a_watch_goes_on_or_lists_again_and_misses_nothing(
    statuses: tuple[int, ...], resync_seconds: float | None, expected: list[str]
) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.put(f"{MAPS}/first", config_map("first"))
            watch = client.watch(CONFIG_MAPS, "default", resync_seconds=resync_seconds)
            assert await seen(watch, 2) == ["ADDED first", "SYNCED "]
            cut(api, *statuses)
            assert await seen(watch, len(expected)) == expected
            api.put(f"{MAPS}/last", config_map("last"))
            assert await seen(watch, 1) == ["ADDED last"]

    asyncio.run(main())


def test_pauses_grow_and_are_short_again_once_a_server_fails_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is back after a while refuses for a moment what its caches do not know yet."""
    pauses: list[float] = []

    def spread(_least: float, most: float) -> float:
        if most < 100:  # else of how long a watch may take
            pauses.append(most)
            return 0.0
        return most

    monkeypatch.setattr(api_client, "_spread", spread)
    monkeypatch.setattr(api_client, "_LONGEST_PAUSE_SECONDS", 90.0)

    async def main() -> None:
        async with serving() as (api, client):
            watch = client.watch(CONFIG_MAPS, "default")
            assert await seen(watch, 1) == ["SYNCED "]
            cut(api, 503, 503, 503, 403, 403)
            assert await seen(watch, 1) == ["ADDED new"]

    asyncio.run(main())
    assert pauses == [0.1, 0.2, 0.4, 0.1, 0.2]


def test_connections_ask_the_server_for_signs_of_life() -> None:
    """A watch without news is silent for minutes: only so is a server noticed that went without closing it."""

    async def main() -> tuple[int, int]:
        query = {"watch": "true", "resourceVersion": "100"}
        async with serving() as (_, client), client._send("GET", MAPS, params=query) as response:
            assert response.connection is not None
            assert response.connection.transport is not None
            used = response.connection.transport.get_extra_info("socket")
            alive = used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            return alive, used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)

    alive, idle_seconds = asyncio.run(main())
    assert (alive, idle_seconds) == (1, 10)
