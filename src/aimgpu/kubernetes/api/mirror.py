"""One kind of objects as the API server has them: listed, watched, and listed again after a gap.

Every program that follows objects does it here, so that all agree on what a gap, a kind that comes later and an object that
cannot be read mean. `Client.watch` is beneath: it takes lost connections up again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from aimgpu.kubernetes.api.client import Client, Object, Resource, WatchEvent
from aimgpu.kubernetes.api.foreign_objects import leaving_out

log = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace and name
Kept = TypeVar("Kept")
OnChange = Callable[[Key, Kept | None, Kept | None], None]


class Mirror(Generic[Kept]):
    """`kept` has what `keep` makes of each object, by namespace and name; an object that `keep` cannot read is left out.

    `synced` is set once everything was listed. A kind that the server does not have counts as listed and empty (`absent`), and
    is waited for. While the server is away, what was seen last stays; what went meanwhile is reported as gone when it is back.
    """

    def __init__(  # noqa: PLR0913 - what is followed
        self,
        client: Client,
        resource: Resource,
        keep: Callable[[Object], Kept],
        *,
        namespaces: Sequence[str] = (),
        labels: str = "",
        fields: str = "",
        select: Callable[[Object], bool] | None = None,
        on_change: OnChange[Kept] | None = None,
        resync_seconds: float | None = None,
    ) -> None:
        """`namespaces`: none means all. `select`: for what no selector of the server says. `on_change`: as `listen`."""
        self.kept: dict[Key, Kept] = {}
        self.synced = asyncio.Event()
        self.absent = False
        self.resource = resource
        self._client = client
        self._keep = keep
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._labels, self._fields, self._select = labels, fields, select
        self._listeners: list[OnChange[Kept]] = [] if on_change is None else [on_change]
        self._resync_seconds = resync_seconds
        self._listed: set[str | None] = set()

    def listen(self, on_change: OnChange[Kept]) -> None:
        """It gets what was kept before and what is kept now; None: nothing. Before `run`, so that it misses none."""
        self._listeners.append(on_change)

    def wrote(self, before: Kept | None, item: Object) -> None:
        """A write of ours was answered with `item`. Where something else was seen than `before` meanwhile, that stays."""
        key = _key(item)
        if self.kept.get(key) is before:
            self.kept[key] = self._keep(item)

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._namespaces:
                group.create_task(self._follow(namespace))

    async def _follow(self, namespace: str | None) -> None:
        async for event in self._client.watch(
            self.resource,
            namespace,
            labels=self._labels,
            fields=self._fields,
            keep=self._select,
            resync_seconds=self._resync_seconds,
        ):
            if event.type in ("SYNCED", "ABSENT"):
                self._saw_list(namespace, absent=event.type == "ABSENT")
            else:
                self._saw(event)

    def _saw_list(self, namespace: str | None, *, absent: bool) -> None:
        if namespace not in self._listed or absent != self.absent:
            data = {"resource": self.resource.plural, "objects": len(self.kept), "absent": absent}
            log.info("mirror.listed", extra={"data": data})
        self.absent = absent
        self._listed.add(namespace)
        if len(self._listed) == len(self._namespaces):
            self.synced.set()

    def _saw(self, event: WatchEvent) -> None:
        key = _key(event.object)
        before, now = self.kept.get(key), None
        with leaving_out(event.object):
            now = None if event.type == "DELETED" else self._keep(event.object)
        if now is None:
            self.kept.pop(key, None)
        else:
            self.kept[key] = now  # in one step: other threads may look
        for listener in self._listeners if before is not None or now is not None else ():
            with leaving_out(event.object):
                listener(key, before, now)


def as_it_is(item: Object) -> Object:
    """Keeps an object without its `managedFields`: half of it, and seldom looked at."""
    item["metadata"].pop("managedFields", None)
    return item


def _key(item: Object) -> Key:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
