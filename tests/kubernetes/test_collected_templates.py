"""Claim templates that no pod uses are removed in two steps, and never from under a pod that is just being admitted."""

import asyncio
import datetime as dt
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving

from aimgpu.kubernetes.cluster.operator.claim_templates import TemplateCollector
from aimgpu.kubernetes.vocabulary.names import UNUSED_SINCE

TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/a/resourceclaimtemplates"
OURS = {"app.kubernetes.io/managed-by": "aim-gpu-sharing"}
NOW = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
LONG = dt.timedelta(seconds=700)


def add(api: ApiServer, name: str, *, age: int = 3600, labels: dict[str, str] | None = None, marked: str | None = None) -> None:
    created = (NOW - dt.timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata: dict[str, Any] = {"name": name, "labels": OURS if labels is None else labels, "creationTimestamp": created}
    api.put(TEMPLATES, {"metadata": metadata | {"annotations": {} if marked is None else {UNUSED_SINCE: marked}}, "spec": {}})


def mark(api: ApiServer, name: str) -> str | None:
    found = api.find(f"{TEMPLATES}/{name}")
    assert found is not None
    return (found["metadata"].get("annotations") or {}).get(UNUSED_SINCE)


def test_an_unused_template_is_marked_then_deleted_and_a_used_one_is_unmarked() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            used: set[tuple[str, str]] = {("a", "busy")}
            collector = TemplateCollector(client, lambda: used, 600.0)
            add(api, "idle")
            add(api, "busy")
            add(api, "young", age=10)
            add(api, "foreign", labels={})
            await collector.sweep(NOW)
            assert mark(api, "idle") == NOW.isoformat()
            assert mark(api, "busy") is mark(api, "young") is None
            await collector.sweep(NOW + dt.timedelta(seconds=599))
            assert mark(api, "idle") == NOW.isoformat()
            used.add(("a", "idle"))
            await collector.sweep(NOW + LONG)
            assert mark(api, "idle") is None  # a pod came in time
            used.clear()
            await collector.sweep(NOW + LONG)
            await collector.sweep(NOW + 2 * LONG + LONG)
            left = {place[2] for place in api.versions()}
            assert left == {"foreign"}

    asyncio.run(main())


def test_a_template_that_admission_needed_after_it_was_marked_is_not_deleted() -> None:
    """Admission takes the mark away between the operator's look and its deletion."""

    async def main() -> None:
        async with serving() as (api, client):
            collector = TemplateCollector(client, set, 600.0)
            add(api, "needed", marked=(NOW - LONG).isoformat())

            def admit(method: str, path: str) -> None:
                if method == "DELETE" and path.endswith("needed"):
                    api.patch(f"{TEMPLATES}/needed", {"metadata": {"annotations": {UNUSED_SINCE: None}}})

            api.fault = admit
            await collector.sweep(NOW)
            assert api.find(f"{TEMPLATES}/needed") is not None

    asyncio.run(main())


def test_only_templates_of_watched_namespaces_are_swept() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            add(api, "idle", marked=(NOW - LONG).isoformat())
            await TemplateCollector(client, set, 600.0, ["b"]).sweep(NOW)
            assert api.writes == []
            await TemplateCollector(client, set, 600.0, ["a", "b"]).sweep(NOW)
            assert len(api.writes) == 1

    asyncio.run(main())


def test_nothing_is_swept_before_the_pods_are_known() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            add(api, "idle", marked=(NOW - LONG).isoformat())
            await TemplateCollector(client, lambda: None, 600.0).sweep(NOW)
            assert api.writes == []

    asyncio.run(main())


@pytest.mark.parametrize("text", ["yesterday", "", "2026-13-01T00:00:00Z"])
def test_a_mark_that_a_person_wrote_is_not_taken_for_old(text: str) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            add(api, "odd", marked=text)
            await TemplateCollector(client, set, 600.0).sweep(NOW)
            assert api.find(f"{TEMPLATES}/odd") is not None

    asyncio.run(main())


def test_a_server_without_claims_has_nothing_to_sweep() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.fault = lambda _method, path: 404 if path.startswith("/apis/resource.k8s.io/") else None
            await TemplateCollector(client, set, 600.0).sweep(NOW)

    asyncio.run(main())
