"""What a Mirror promises, whichever API server it follows."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.kubernetes.api_server import until

from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.api.mirror import Key, Mirror

MAPS = Resource(version="v1", plural="configmaps", namespaced=True)
WIDGETS = Resource(group="mirror.example.com", version="v1", plural="widgets", namespaced=True)
MARK = "mirror-contract"


@dataclass
class Followed:
    """A mirror and what it reported."""

    mirror: Mirror[str]
    seen: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def note(self, key: Key, before: str | None, now: str | None) -> None:
        self.seen.append((key[1], before, now))

    def shows(self, **values: str) -> bool:
        return {name: value for (_, name), value in self.mirror.kept.items()} == values


def config_map(name: str, value: object, *, marked: bool = True) -> Object:
    labels = {MARK: "yes"} if marked else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {"value": value}}


@asynccontextmanager
async def following(client: Client, *namespaces: str, resource: Resource = MAPS) -> AsyncIterator[Followed]:
    mirror = Mirror(client, resource, _value, namespaces=namespaces, labels=MARK)
    found = Followed(mirror)
    mirror.listen(found.note)
    task = asyncio.ensure_future(mirror.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def check_follows(client: Client, first: str, second: str) -> None:
    """What is there is listed, changes are reported with what was before, and other labels and namespaces are not seen."""
    await client.create(MAPS, config_map("old", "1"), first)
    await client.create(MAPS, config_map("other", "1", marked=False), first)
    async with following(client, first) as found:
        await found.mirror.synced.wait()
        assert found.shows(old="1")
        await client.create(MAPS, config_map("new", "1"), first)
        await client.create(MAPS, config_map("elsewhere", "1"), second)
        await client.patch(MAPS, "old", {"data": {"value": "2"}}, first)
        await until(lambda: found.shows(old="2", new="1"))
        await client.patch(MAPS, "new", {"metadata": {"labels": {MARK: None}}}, first)  # not selected any more
        await client.delete(MAPS, "old", first)
        await until(found.shows)
        assert [one for one in found.seen if one[0] == "old"] == [("old", None, "1"), ("old", "1", "2"), ("old", "2", None)]
        assert [one for one in found.seen if one[0] == "new"] == [("new", None, "1"), ("new", "1", None)]
    async with following(client, first, second) as found:
        await found.mirror.synced.wait()
        assert found.shows(elsewhere="1")


async def check_gap(client: Client, namespace: str, interrupt: Callable[[], Awaitable[None]]) -> None:
    """`interrupt` loses all watches. What went, came and changed meanwhile is reported; what is the same is not."""
    for name in ("same", "changed", "gone"):
        await client.create(MAPS, config_map(name, "1"), namespace)
    async with following(client, namespace) as found:
        await found.mirror.synced.wait()
        found.seen.clear()
        await interrupt()
        await until(lambda: found.shows(same="1", changed="2", came="1"))
        assert sorted(found.seen, key=str) == [("came", None, "1"), ("changed", "1", "2"), ("gone", "1", None)]


async def change_in_gap(client: Client, namespace: str) -> None:
    """What the interruption of `check_gap` is to change."""
    await client.delete(MAPS, "gone", namespace)
    await client.patch(MAPS, "changed", {"data": {"value": "2"}}, namespace)
    await client.create(MAPS, config_map("came", "1"), namespace)


async def check_unreadable(client: Client, namespace: str) -> None:
    """An object that cannot be read is left out, and counts as gone where it could be read before; the others stay."""
    await client.create(MAPS, config_map("good", "1"), namespace)
    await client.create(MAPS, config_map("bad", "unreadable"), namespace)
    async with following(client, namespace) as found:
        await found.mirror.synced.wait()
        assert found.shows(good="1")
        await client.patch(MAPS, "bad", {"data": {"value": "1"}}, namespace)
        await until(lambda: found.shows(good="1", bad="1"))
        await client.patch(MAPS, "bad", {"data": {"value": "unreadable"}}, namespace)
        await until(lambda: found.shows(good="1"))
        assert found.seen[-1] == ("bad", "1", None)


async def check_kind_that_comes_later(client: Client, namespace: str, install: Callable[[], Awaitable[None]]) -> None:
    """Until it is there it counts as listed and empty."""
    async with following(client, namespace, resource=WIDGETS) as found:
        await found.mirror.synced.wait()
        assert found.mirror.absent
        await install()
        widget = {
            "apiVersion": "mirror.example.com/v1",
            "kind": "Widget",
            "metadata": {"name": "w", "labels": {MARK: "yes"}},
            "data": {"value": "1"},
        }
        await client.create(WIDGETS, widget, namespace)
        await until(lambda: found.shows(w="1"))
        assert not found.mirror.absent


def _value(item: Object) -> str:
    value = str(item["data"]["value"])
    if value == "unreadable":
        raise ValueError(value)
    return value
