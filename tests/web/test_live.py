"""What open tabs are sent: everything first, then only what changed; and none of them can hold up the others."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import deployment
from tests.web.page_in_process import LocalPage, local_page
from tests.web.test_prompts import finished

from aimgpu.web import live

SECTIONS = ["page", "gpus", "models", "queue", "history", "requests", "journal"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPage]:
    monkeypatch.setattr(live, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(live, "_FRESH_SECONDS", 0.0)
    with local_page(tmp_path, [deployment("chat", 40)]) as found:
        yield found


def parse(chunk: bytes) -> list[tuple[str, Any]]:
    found = []
    for event in chunk.decode().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in event.splitlines())
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def until(stream: AsyncIterator[bytes], name: str, holds: Callable[[Any], bool] = bool) -> Any:
    async for chunk in stream:
        for event, body in parse(chunk):
            if event == name and holds(body):
                return body
    raise AssertionError(f"the stream ended before {name}")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_a_tab_is_sent_everything_then_what_changes(page: LocalPage) -> None:
    async def work() -> None:
        stream = page.live.stream()
        first = parse(await anext(stream))
        assert [name for name, _ in first] == SECTIONS
        assert [model["name"] for model in dict(first)["models"]] == ["chat"]
        page.waiting = {"late": "no room"}
        page.notes = ["Something is missing."]
        body = await until(stream, "page")
        assert body["notes"] == ["Something is missing."]
        await asyncio.to_thread(page.controller.apply, [deployment("chat", 40), deployment("second", 10)])
        body = await until(stream, "models", lambda rows: len(rows) == 2 and rows[1]["state"] == "ready")
        assert body[1]["granted_bytes"] == 10 << 30
        await until(stream, "journal", lambda rows: any(one["model"] == "second" and "ready" in one["text"] for one in rows))
        await page.live.close()

    run(work)


def test_a_request_that_ended_is_sent_once_and_without_its_prompt(page: LocalPage) -> None:
    async def work() -> None:
        stream = page.live.stream()
        await anext(stream)
        page.activity.finished(finished("a secret"))
        (request,) = await until(stream, "requests")
        assert (request["number"], request["model"], "prompt" in request) == (1, "chat", False)
        page.activity.finished(finished(None))
        (request,) = await until(stream, "requests")
        assert request["number"] == 2
        late = page.live.stream()
        assert [one["number"] for one in dict(parse(await anext(late)))["requests"]] == [1, 2]
        await page.live.close()

    run(work)


def test_what_does_not_change_is_not_sent_again(page: LocalPage) -> None:
    async def work() -> None:
        stream = page.live.stream()
        await anext(stream)
        names: list[str] = []

        async def read_on() -> None:
            async for chunk in stream:
                names.extend(name for name, _ in parse(chunk))

        reading = asyncio.ensure_future(read_on())
        reads = Counted(page)
        await reads.wait_for(20)
        assert names == []
        page.notes = ["the end"]
        await reads.wait_for(2)
        await page.live.close()
        await reading
        assert names == ["page"]

    run(work)


class Counted:
    """Counts how often the state was built; `change` makes each of them different."""

    def __init__(self, page: LocalPage, *, change: bool = False) -> None:
        self.count = 0
        self._changed = threading.Condition()
        inner = page.state.read

        def read(scores: Any) -> Any:
            with self._changed:
                self.count += 1
                self._changed.notify_all()
            if change:
                page.notes = [str(self.count)]
            return inner(scores)

        page.state.read = read  # type: ignore[method-assign]

    async def wait_for(self, more: int) -> None:
        wanted = self.count + more
        await asyncio.to_thread(self._wait, wanted)

    def _wait(self, wanted: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.count >= wanted)


def test_a_tab_that_reads_nothing_is_cut_off_and_the_others_go_on(page: LocalPage) -> None:
    async def work() -> None:
        slow, quick = page.live.stream(), page.live.stream()
        await anext(slow)
        await anext(quick)
        seen: list[str] = []

        async def read_on() -> None:
            async for chunk in quick:
                seen.extend(body["notes"][0] for name, body in parse(chunk) if name == "page")

        reading = asyncio.ensure_future(read_on())
        reads = Counted(page, change=True)
        await reads.wait_for(live._MOST_BEHIND + 20)
        assert [chunk async for chunk in slow] == [], "it ends at once, and the browser connects again"
        assert len(seen) > live._MOST_BEHIND, "the other tab got all of it"
        await page.live.close()
        await reading

    run(work)


def test_a_tab_whose_reader_is_cancelled_as_an_event_comes_ends_as_cancelled(page: LocalPage) -> None:
    async def work() -> None:
        stream = page.live.stream()
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(10):
            await asyncio.sleep(0)  # it waits for an event now
        closing = asyncio.ensure_future(page.live.close())  # sends the last event
        asyncio.get_running_loop().call_soon(reading.cancel)
        await asyncio.wait([reading])
        assert reading.cancelled()
        await closing

    run(work)


def test_closing_ends_every_stream_and_nothing_is_built_without_a_tab(page: LocalPage) -> None:
    async def work() -> None:
        reads = Counted(page)
        await asyncio.sleep(0)
        assert reads.count == 0
        tabs = [page.live.stream() for _ in range(3)]
        for tab in tabs:
            await anext(tab)
        await page.live.close()
        for tab in tabs:
            assert [chunk async for chunk in tab] == []
        assert not page.live._tabs
        late = page.live.stream()
        await anext(late)
        with pytest.raises(StopAsyncIteration):
            await anext(late)

    run(work)


def test_a_page_that_looks_after_a_while_finds_history_kept_meanwhile(page: LocalPage) -> None:
    async def work() -> None:
        sampled = asyncio.Event()
        loop, inner = asyncio.get_running_loop(), page.state.sample

        def sample(scores: Any) -> Any:
            found = inner(scores)
            loop.call_soon_threadsafe(sampled.set)
            return found

        page.state.sample = sample  # type: ignore[method-assign]
        page.live.start()
        await sampled.wait()
        stream = page.live.stream()
        (kept,) = dict(parse(await anext(stream)))["history"]
        assert sum(gpu["granted"] for gpu in kept["gpus"].values()) == 40 << 30
        await page.live.close()

    run(work)
