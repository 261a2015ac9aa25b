"""`/api/pull`: fetch a model's files, with progress, as Ollama's clients show it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import orjson

from aimgpu.errors import AimGpuError, InvalidRequest, NotAllowed
from aimgpu.gateway.dialects.call import Call, Fields, ModelFetcher
from aimgpu.gateway.dialects.ollama.requests import read_flag
from aimgpu.gateway.http.asgi import NO_STORE, send_json
from aimgpu.gateway.routes import LATEST
from aimgpu.pools import SmallPool

_SUCCESS: Fields = {"status": "success"}
_PATHS = ("/", ".", "~")
_NDJSON = (b"content-type", b"application/x-ndjson")


async def pull(call: Call) -> None:
    """A model that is deployed is there already. Others are fetched, for callers without restrictions."""
    fields = await call.read_fields()
    given = fields.get("model") or fields.get("name")
    if not isinstance(given, str):
        raise InvalidRequest("'model' must name a model.", param="model")
    name = given.removesuffix(LATEST)
    stream = read_flag(fields, "stream", default=True)
    deployed = any(name in (model.name, *model.aliases) for model in call.visible())
    if not deployed and not call.caller.unrestricted:
        raise NotAllowed("This API key may not fetch models.", hint="Its models, priority or rate are restricted.")
    if not deployed and name.startswith(_PATHS):
        raise NotAllowed("Models are fetched by name here, not by path.", hint="`aimgpu pull` on the machine takes paths.")
    events = _nothing_to_do() if deployed else _events(call.services.fetcher, name, call.services.pulls)
    if stream:
        await _stream(call, events)
    else:
        async for _ in events:
            pass
        await send_json(call.send, _SUCCESS)


async def _nothing_to_do() -> AsyncIterator[Fields]:
    yield {"status": "pulling manifest"}
    yield _SUCCESS


async def _events(fetcher: ModelFetcher | None, name: str, pulls: SmallPool) -> AsyncIterator[Fields]:
    """Progress of a thread that fetches. A caller that leaves does not stop it: the next one finds more of it there."""
    if fetcher is None:
        raise NotAllowed("Models are not fetched here.")
    loop = asyncio.get_running_loop()
    changes: asyncio.Queue[Fields | None] = asyncio.Queue()

    def progress(what: str, done: int, total: int | None) -> None:
        event = {
            "status": f"pulling {what}",
            "digest": f"sha256:{hashlib.sha256(what.encode()).hexdigest()}",
            "completed": done,
        }
        loop.call_soon_threadsafe(changes.put_nowait, event | ({"total": total} if total else {}))

    async def work() -> None:
        try:
            await pulls.run(fetcher.pull, name, progress)
        finally:
            changes.put_nowait(None)

    task = asyncio.create_task(work())
    yield {"status": "pulling manifest"}
    while (event := await changes.get()) is not None:
        yield event
    await task
    yield _SUCCESS


async def _stream(call: Call, events: AsyncIterator[Fields]) -> None:
    """What fails at once has a status of its own; what fails later is the last line."""
    await anext(events)
    first = await anext(events)
    await call.send({"type": "http.response.start", "status": 200, "headers": [_NDJSON, NO_STORE]})
    await call.send(
        {"type": "http.response.body", "body": _line({"status": "pulling manifest"}) + _line(first), "more_body": True}
    )
    try:
        async for event in events:
            await call.send({"type": "http.response.body", "body": _line(event), "more_body": True})
    except AimGpuError as error:
        await call.send({"type": "http.response.body", "body": _line({"error": error.message}), "more_body": True})
    await call.send({"type": "http.response.body", "body": b""})


def _line(value: Fields) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
