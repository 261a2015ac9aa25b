"""Removes claim templates that admission made and no pod uses any more.

In two steps, so that a template is never taken from a pod that is just being admitted: it is marked as unused first. Admission
takes the mark away before it lets a pod refer to the template, and one that was touched after it was marked is not deleted.
"""

import asyncio
import datetime as dt
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from aimgpu.errors import AimGpuError, ClusterConflict, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Mirror, as_it_is
from aimgpu.kubernetes.api.resources import CLAIM_TEMPLATES
from aimgpu.kubernetes.vocabulary.names import MANAGED_BY, UNUSED_SINCE

log = logging.getLogger(__name__)

OURS = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())

TemplateKey = tuple[str, str]  # namespace and name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to do with the templates that there are."""

    mark: list[Object] = field(default_factory=list)
    unmark: list[Object] = field(default_factory=list)
    delete: list[Object] = field(default_factory=list)


def plan_sweep(templates: Iterable[Object], used: set[TemplateKey], now: dt.datetime, keep_seconds: float) -> Sweep:
    """`used`: templates that a pod refers to. One that is as young as `keep_seconds` may belong to a pod not seen yet."""
    sweep = Sweep()
    for item in templates:
        metadata = item["metadata"]
        marked = (metadata.get("annotations") or {}).get(UNUSED_SINCE)
        if (metadata["namespace"], metadata["name"]) in used:
            if marked:
                sweep.unmark.append(item)
        elif marked is None:
            if _age(metadata["creationTimestamp"], now) > keep_seconds:
                sweep.mark.append(item)
        elif _age(marked, now) > keep_seconds:
            sweep.delete.append(item)
    return sweep


def _age(since: str, now: dt.datetime) -> float:
    try:
        return (now - dt.datetime.fromisoformat(since)).total_seconds()
    except ValueError:  # not ours
        return 0.0


class TemplateCollector:
    """Looks at the mirror of the templates now and then, and at the server where that has something to do.

    `read_used` is None until the pods of the cluster are known.
    """

    def __init__(
        self,
        client: Client,
        read_used: Callable[[], set[TemplateKey] | None],
        keep_seconds: float = 600.0,
        namespaces: Sequence[str] = (),
    ) -> None:
        """`namespaces`: whose templates; none means all."""
        self._client = client
        self._read_used = read_used
        self._keep_seconds = keep_seconds
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._templates = Mirror(client, CLAIM_TEMPLATES, _without_spec, namespaces=namespaces, labels=OURS)

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._templates.run())
            while True:
                await asyncio.sleep(min(self._keep_seconds, 60.0))
                try:
                    await self._sweep_where_needed(dt.datetime.now(dt.UTC))
                except (AimGpuError, OSError) as error:
                    log.warning("templates.not_swept", extra={"data": {"reason": str(error)}})

    async def _sweep_where_needed(self, now: dt.datetime) -> None:
        used = self._read_used()
        if used is not None and plan_sweep(self._templates.kept.values(), used, now, self._keep_seconds) != Sweep():
            await self.sweep(now)

    async def sweep(self, now: dt.datetime) -> None:
        """One look."""
        try:  # before the pods: one made since then is not among these
            lists = [await self._client.list(CLAIM_TEMPLATES, place, labels=OURS) for place in self._namespaces]
        except NotFoundInCluster:  # a server without claims
            return
        used = self._read_used()
        if used is None:
            return
        templates = [item for items, _ in lists for item in items]
        sweep = plan_sweep(templates, used, now, self._keep_seconds)
        for item in sweep.mark:
            await self._annotate(item, now.isoformat())
        for item in sweep.unmark:
            await self._annotate(item, None)
        for item in sweep.delete:
            await self._delete(item)

    async def _annotate(self, item: Object, since: str | None) -> None:
        metadata = item["metadata"]
        body = {"metadata": {"annotations": {UNUSED_SINCE: since}}}
        await self._client.patch(CLAIM_TEMPLATES, metadata["name"], body, metadata["namespace"])

    async def _delete(self, item: Object) -> None:
        metadata = item["metadata"]
        try:
            await self._client.delete(
                CLAIM_TEMPLATES, metadata["name"], metadata["namespace"], version=metadata["resourceVersion"]
            )
        except ClusterConflict:  # admission needed it a moment ago
            return
        log.info("template.deleted", extra={"data": {"namespace": metadata["namespace"], "name": metadata["name"]}})


def _without_spec(item: Object) -> Object:
    return {"metadata": as_it_is(item)["metadata"]}
