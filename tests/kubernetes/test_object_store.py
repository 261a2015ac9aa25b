"""The API server of the tests behaves as the real one does, as far as our programs rely on it.

`test_operator_cluster.py` holds the real one to the same contract.
"""

import asyncio

import pytest
from tests.kubernetes.api_server import serving, until
from tests.kubernetes.store_contract import check_cordons, check_objects

from aimgpu.kubernetes.api.client import Resource

MAPS = Resource(version="v1", plural="configmaps", namespaced=True)


def test_the_contract_holds() -> None:
    async def main() -> None:
        async with serving() as (_, client):
            await check_objects(client, "team")
            await check_cordons(client, "contract")

    asyncio.run(main())


@pytest.mark.parametrize("refused", [False, True])
def test_a_watch_lists_follows_and_lists_again_after_a_gap(*, refused: bool) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.refuses_expired = refused
            path = "/api/v1/namespaces/team/configmaps"
            api.put(path, {"metadata": {"name": "kept"}})
            seen: list[tuple[str, str]] = []

            async def follow() -> None:
                async for event in client.watch(MAPS, "team"):
                    seen.append((event.type, (event.object.get("metadata") or {}).get("name", "")))  # noqa: PERF401 - as they come

            following = asyncio.ensure_future(follow())
            await until(lambda: ("SYNCED", "") in seen)
            api.put(path, {"metadata": {"name": "lost"}})
            await until(lambda: ("ADDED", "lost") in seen)
            api.store.delete(("configmaps", "team", "lost"))
            api.store.forget_history()
            api.put(path, {"metadata": {"name": "new"}})
            await until(lambda: ("DELETED", "lost") in seen and ("ADDED", "new") in seen)
            assert seen.count(("ADDED", "kept")) == 1
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())
