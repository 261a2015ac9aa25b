"""Every route of the daemon, under every circumstance, lets through what the table says, and nothing else."""

import asyncio
import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

from tests.gateway.conftest import TestRoutes
from tests.web.calling import Browser

from aimgpu.daemon.api import ApiDependencies, create_api
from aimgpu.daemon.doors import NO, WHO, YES, Asked, Carried, DoorOf, judge, list_doors
from aimgpu.daemon.router import Admission, Router
from aimgpu.gateway.application import Gateway, GatewayDependencies, GatewaySettings
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.openapi import describe_gateway
from aimgpu.keyfile import hash_key
from aimgpu.web.authority import Authority
from aimgpu.web.doors import Door
from aimgpu.web.routes import PageApplication

TOKEN, FULL, LIMITED, EXPIRED = "the-token", "full-key", "limited-key", "expired-key"
CALLERS = {hash_key(FULL): Caller(name="full"), hash_key(LIMITED): Caller(name="limited", models=frozenset({"chat"}))}
CALLERS[hash_key(EXPIRED)] = Caller(name="expired", expires=time.time() - 1)
PLACES = {"{code}": "CODE", "{number:int}": "1", "{name:path}": "chat", "{name}": "chat", "{id}": "chat", "{instance_id}": "i"}


class PassedError(Exception):
    """A handler was reached and did its work."""


class Behind:
    """Whatever is behind a door."""

    def __getattr__(self, _name: str) -> "Behind":
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        raise PassedError


class World:
    """The daemon's port over nothing: what a request reaches, and whether it got there."""

    def __init__(self, *, keys: bool) -> None:
        table = KeyTable(CALLERS if keys else {}, required=keys)
        self.authority = Authority(TOKEN, table, lambda _client, _server: 1000)
        behind: Any = Behind()
        parts = dict.fromkeys(ApiDependencies.__dataclass_fields__, behind) | {"token": TOKEN}
        page = PageApplication(behind, behind, self.authority, create_api(ApiDependencies(**parts)))
        self.gateway = Gateway(TestRoutes(), GatewaySettings(), GatewayDependencies(keys=table))
        self.gateway.fallback = Router(page, behind, Admission(keys=table, authority=self.authority), dict)
        browser = Browser(self.gateway, ((b"host", b"127.0.0.1:8081"),))
        cookie = self.authority.open_link(browser._scope("GET", "/"), self.authority.make_link().removeprefix("/link/"))
        assert cookie is not None
        self.cookie = cookie.partition(";")[0].encode()

    async def ask(self, route: DoorOf, asked: Asked, secret: str | None = None) -> int:
        """The status: YES for all but the refusals of a door. `secret`: sent in place of what belongs to the credential."""
        path = re.sub(r"\{[^}]+\}", lambda place: PLACES[place[0]], route.path)
        path = self.authority.make_link() if route.path == "/link/{code}" else path
        try:
            answer = await Browser(self.gateway, list(self._head(asked, secret))).send(route.method, path, {})
        except PassedError:
            return YES
        if route.door is Door.MODELS and answer.status == NO and b"Without an API key" not in answer.body:
            return YES  # /api/copy and the like are not offered to anybody
        return answer.status if answer.status in (WHO, NO) else YES

    def _head(self, asked: Asked, secret: str | None = None) -> Iterator[tuple[bytes, bytes]]:
        host = b"127.0.0.1:8081" if asked.own_host else b"rebound.evil.example"
        yield b"host", host
        yield b"x-aimgpu-page", b"1"
        yield b"content-type", b"application/json"
        yield b"origin", b"http://" + host if asked.own_site else b"http://evil.example"
        if not asked.local:
            yield b"x-forwarded-for", b"203.0.113.7"
        if asked.credential is Carried.LINK:
            yield b"cookie", self.cookie
        secret = secret or {Carried.LOW: LIMITED, Carried.KEY: FULL, Carried.TOKEN: TOKEN}.get(asked.credential)
        if secret is not None:
            yield b"authorization", f"Bearer {secret}".encode()


def circumstances(*, keys: bool) -> list[Asked]:
    credentials = list(Carried) if keys else [Carried.NONE, Carried.LINK, Carried.TOKEN]
    return [
        Asked(credential=credential, keys=keys, own_host=host, own_site=site, local=local)
        for credential, host, site, local in itertools.product(credentials, (True, False), (True, False), (True, False))
    ]


def differences(*, keys: bool) -> list[tuple[str, str, Asked, int, int]]:
    async def main() -> list[tuple[str, str, Asked, int, int]]:
        found, world = [], World(keys=keys)
        for route, asked in itertools.product(list_doors(), circumstances(keys=keys)):
            wanted, got = judge(route.door, asked), await world.ask(route, asked)
            if got != wanted:
                found.append((route.method, route.path, asked, wanted, got))
        await world.gateway.close()
        return found

    return asyncio.run(main())


def test_without_keys_every_route_lets_through_what_the_table_says() -> None:
    assert differences(keys=False) == []


def test_with_keys_every_route_lets_through_what_the_table_says() -> None:
    assert differences(keys=True) == []


def test_an_expired_key_opens_no_door_that_is_closed_to_one_who_has_none() -> None:
    async def main() -> list[tuple[str, str, Asked, int]]:
        found, world = [], World(keys=True)
        for route, asked in itertools.product(list_doors(), circumstances(keys=True)):
            if asked.credential is Carried.NONE and judge(route.door, asked) != YES:
                got = await world.ask(route, asked, secret=EXPIRED)
                if got == YES:
                    found.append((route.method, route.path, asked, got))
        await world.gateway.close()
        return found

    assert asyncio.run(main()) == []


def test_every_path_that_the_gateway_describes_has_a_door() -> None:
    listed = {(route.path, route.method) for route in list_doors()}
    described = {(path, method.upper()) for path, methods in describe_gateway("1")["paths"].items() for method in methods}
    assert described <= listed


def test_every_route_of_the_page_and_the_api_has_a_door() -> None:
    """One that is added beside their tables would have none."""
    behind: Any = Behind()
    api = create_api(ApiDependencies(**dict.fromkeys(ApiDependencies.__dataclass_fields__, behind)))
    page = PageApplication(behind, behind, Authority(TOKEN, KeyTable({}, required=False)), api)._own
    routes: list[Any] = [*api.routes, *page.routes]
    found = {(each.path, method) for each in routes for method in each.methods - {"HEAD"}}
    assert len(found) > 20
    assert found <= {(route.path, route.method) for route in list_doors()}


def test_what_has_no_door_is_not_there() -> None:
    """A path beside the table's is answered with 404: a new route without a row would be found here or in its own table."""
    paths = [
        "/api/v1/new",
        "/api/v2/state",
        "/v1/new",
        "/page/other.js",
        "/metrics/",
        "/admin",
        "/api/new",
        "/link",
        "/link/a/b",
    ]

    async def main() -> list[int]:
        world = World(keys=False)
        token = Asked(credential=Carried.TOKEN)
        browser = Browser(world.gateway, list(world._head(token)))
        found = [(await browser.get(path)).status for path in paths]
        await world.gateway.close()
        return found

    assert set(asyncio.run(main())) == {404}


def test_no_route_is_listed_twice_and_none_that_changes_something_is_open() -> None:
    listed = list_doors()
    assert len({(route.path, route.method) for route in listed}) == len(listed)
    lenient = {route.path for route in listed if route.method != "GET" and route.door not in (Door.CHANGE, Door.MODELS)}
    assert lenient == {"/api/v1/size", "/api/v1/what-if"}
    assert all(route.door is Door.CHANGE for route in listed if route.path.endswith(("/prompt", "/log")))
