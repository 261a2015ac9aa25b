"""A Mirror against the API server of the tests: what it promises, and what only this server can show."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.kubernetes import mirror_contract as contract
from tests.kubernetes.api_server import ApiServer, serving, until

from aimgpu.kubernetes.api import client as api_client
from aimgpu.kubernetes.api.client import Client

MAPS = "/api/v1/namespaces/team/configmaps"


def play(scenario: Callable[[ApiServer, Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            await scenario(api, client)

    asyncio.run(main())


def test_it_follows_what_its_selectors_name() -> None:
    play(lambda _, client: contract.check_follows(client, "team", "other"))


@pytest.mark.parametrize("refused", [False, True])
def test_it_lists_again_after_a_gap(*, refused: bool) -> None:
    async def scenario(api: ApiServer, client: Client) -> None:
        async def interrupt() -> None:
            """The watch ends, and no other begins until what it would have reported is forgotten."""
            api.refuses_expired = refused
            api.fault = lambda _method, path: 503 if path == MAPS else None
            api.store.forget_history()
            api.put("/api/v1/namespaces/elsewhere/configmaps", contract.config_map("wake", "1"))
            api.remove(f"{MAPS}/gone")
            api.put(MAPS, contract.config_map("changed", "2"))
            api.put(MAPS, contract.config_map("came", "1"))
            api.store.forget_history()
            api.fault = lambda _method, _path: None

        await contract.check_gap(client, "team", interrupt)

    play(scenario)


def test_what_cannot_be_read_is_left_out() -> None:
    play(lambda _, client: contract.check_unreadable(client, "team"))


def test_a_kind_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_LONGEST_ABSENCE_SECONDS", 0.05)

    async def scenario(api: ApiServer, client: Client) -> None:
        api.absent.add("mirror.example.com/v1")

        async def install() -> None:
            api.absent.discard("mirror.example.com/v1")

        await contract.check_kind_that_comes_later(client, "team", install)

    play(scenario)


def test_while_the_server_is_away_what_was_seen_stays() -> None:
    async def scenario(api: ApiServer, client: Client) -> None:
        api.put(MAPS, contract.config_map("one", "1"))
        async with contract.following(client, "team") as found:
            await found.mirror.synced.wait()
            refused = 0

            def away(_method: str, _path: str) -> int:
                nonlocal refused
                refused += 1
                return 500

            api.fault = away
            api.store.forget_history()
            api.put("/api/v1/namespaces/elsewhere/configmaps", contract.config_map("wake", "1"))
            await until(lambda: refused > 2)
            assert found.shows(one="1")

    play(scenario)


def test_a_slow_listener_misses_nothing() -> None:
    """Changes come while one is handled; each is handled with what was before."""

    async def scenario(api: ApiServer, client: Client) -> None:
        async with contract.following(client, "team") as found:
            await found.mirror.synced.wait()

            def write(*_: object) -> None:
                if len(found.seen) == 1:
                    api.put(MAPS, contract.config_map("more", "1"))

            found.mirror.listen(write)
            for number in range(200):
                api.put(MAPS, contract.config_map("one", str(number)))
            await until(lambda: found.shows(one="199", more="1"))
            changes = [(before, now) for name, before, now in found.seen if name == "one"]
            assert all(before == last for (before, _), (_, last) in zip(changes[1:], changes[:-1], strict=True))

    play(scenario)


def test_a_write_of_ours_does_not_hide_what_was_seen_meanwhile() -> None:
    async def scenario(api: ApiServer, client: Client) -> None:
        api.put(MAPS, contract.config_map("one", "1"))
        async with contract.following(client, "team") as found:
            await found.mirror.synced.wait()
            before = found.mirror.kept["team", "one"]
            answered = api.put(MAPS, contract.config_map("one", "ours"))
            api.put(MAPS, contract.config_map("one", "newer"))
            await until(lambda: found.shows(one="newer"))
            found.mirror.wrote(before, answered)
            assert found.shows(one="newer")
            found.mirror.wrote(found.mirror.kept["team", "one"], answered)
            assert found.shows(one="ours")

    play(scenario)
