"""An engine made of a socket and a script: what it does with a request is a coroutine that a test chooses."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self


@dataclass(slots=True)
class Asked:
    """One request as the engine got it."""

    line: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    @property
    def fields(self) -> dict[str, object]:
        parsed: dict[str, object] = json.loads(self.body)
        return parsed


Script = Callable[["ScriptedEngine", Asked], Awaitable[None]]


async def answer_json(asked: Asked, value: object, status: str = "200 OK") -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nserver: secret/1.0\r\n\r\n"
    asked.writer.write(head.encode() + body)
    await asked.writer.drain()


async def begin_stream(asked: Asked) -> None:
    asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await asked.writer.drain()


async def write_chunk(asked: Asked, data: bytes) -> None:
    asked.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await asked.writer.drain()


async def end_stream(asked: Asked) -> None:
    asked.writer.write(b"0\r\n\r\n")
    await asked.writer.drain()


def event(text: str) -> bytes:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps(chunk | {"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
}


async def polite(engine: "ScriptedEngine", asked: Asked) -> None:
    if asked.fields.get("stream"):
        await begin_stream(asked)
        for word in ("Hel", "lo", "!"):
            await write_chunk(asked, event(word))
        await write_chunk(asked, b"data: [DONE]\n\n")
        await end_stream(asked)
    else:
        await answer_json(asked, COMPLETION)


async def wait_for_release(engine: "ScriptedEngine", asked: Asked) -> None:
    """Holds every request until the test lets them go."""
    await asyncio.to_thread(engine.released.wait)
    await polite(engine, asked)


async def stream_until_gone(engine: "ScriptedEngine", asked: Asked) -> None:
    """One event, then silence: ends when the caller leaves."""
    await begin_stream(asked)
    await write_chunk(asked, event("first"))
    engine.streaming.set()
    await asked.reader.read(1)
    engine.saw_leave.set()


async def silent_until_gone(engine: "ScriptedEngine", asked: Asked) -> None:
    engine.streaming.set()
    await asked.reader.read(1)
    engine.saw_leave.set()


async def die_mid_event(engine: "ScriptedEngine", asked: Asked) -> None:
    await begin_stream(asked)
    await write_chunk(asked, event("whole"))
    await write_chunk(asked, event("half")[:20])
    asked.writer.transport.abort()


async def die_mid_json(engine: "ScriptedEngine", asked: Asked) -> None:
    asked.writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"id":')
    await asked.writer.drain()
    asked.writer.transport.abort()


async def die_at_once(engine: "ScriptedEngine", asked: Asked) -> None:
    asked.writer.transport.abort()


async def talk_garbage(engine: "ScriptedEngine", asked: Asked) -> None:
    asked.writer.write(b"\x00\xff this is not HTTP\r\n\r\n")
    await asked.writer.drain()


async def fail_inside(engine: "ScriptedEngine", asked: Asked) -> None:
    await answer_json(asked, {"error": {"message": "CUDA out of memory", "type": "x"}}, "500 Internal Server Error")


async def too_long(engine: "ScriptedEngine", asked: Asked) -> None:
    error = {"message": "the prompt is too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
    await answer_json(asked, {"error": error}, "400 Bad Request")


@dataclass
class ScriptedEngine:
    script: Script = polite
    asked: list[Asked] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    streaming: threading.Event = field(default_factory=threading.Event)
    saw_leave: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (text.split(": ", 1) for text in rest)}
        body = await reader.readexactly(int(headers["content-length"]))
        asked = Asked(line, headers, body, writer, reader)
        self.asked.append(asked)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await self.script(self, asked)
        finally:
            self.active -= 1
        return not writer.transport.is_closing()
