"""The control API: JSON over HTTP for the command line and the page, behind a token that only the daemon's user can read."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.stack.overrides import unmask
from aimgpu.control.stack.stack_file import Stack, parse_stack
from aimgpu.daemon.log_tail import follow_log, read_tail
from aimgpu.daemon.programs import ProgramLine
from aimgpu.daemon.status import Addresses, StatusSources, describe_status
from aimgpu.domain import Deployment, InstanceState, ProcessIdentity, QueueSettings
from aimgpu.domain.codec import decode
from aimgpu.errors import AimGpuError, InvalidInput, NotAllowed, UnknownDeployment, from_os_error
from aimgpu.keyfile import bearer_token
from aimgpu.placement import snapshot_to_json
from aimgpu.pools import SmallPool, run_in_thread
from aimgpu.web.error_answers import make_error_handlers
from aimgpu.web.request_body import read_json

_LARGEST_BODY = 4 << 20
_MOST_LOG_LINES = 10_000
_LONGEST_WAIT_SECONDS = 10**9  # for room: as good as for ever
_LONG = "api"  # what takes minutes has a thread of its own, and takes none that quick answers need


ROUTES = (  # all behind `Door.CHANGE`
    ("GET", "/api/v1/status", "status"),
    ("GET", "/api/v1/slo", "slo"),
    ("GET", "/api/v1/snapshot", "snapshot"),
    ("POST", "/api/v1/apply", "apply"),
    ("POST", "/api/v1/exec", "exec"),
    ("POST", "/api/v1/release", "release"),
    ("POST", "/api/v1/partition", "partition"),
    ("POST", "/api/v1/resize", "resize"),
    ("POST", "/api/v1/stop", "stop"),
    ("GET", "/api/v1/instances/{instance_id}/log", "log"),
)


class QueueStore(Protocol):
    """The queue's settings in the ledger and in the gateway that runs."""

    def read(self) -> QueueSettings: ...

    def change(self, settings: QueueSettings) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDependencies:
    status: StatusSources
    token: str
    addresses: Addresses
    reconciled: asyncio.Event  # nothing is changed before the ledger equals the truth
    expect: Callable[[Sequence[Deployment]], AbstractContextManager[None]]  # callers of these are held meanwhile
    check_gpus: Callable[[Stack], None]  # raises Conflict where the stack wants other GPUs than the daemon has
    stop: Callable[[], None]  # ends the daemon after the answer is out
    read_sharing: Callable[[], Mapping[str, object]]  # by model, what it leaves to others on its GPU, as JSON
    read_scores: Callable[[], Mapping[str, object]]  # the gateway's promises, queues and pressure, as JSON
    describe_queue: Callable[[], Mapping[str, object]]  # its stated bounds, as JSON
    queue: QueueStore
    line: ProgramLine


def create_api(parts: ApiDependencies) -> Starlette:
    api = _Api(parts)
    routes = [Route(path, getattr(api, name), methods=[method]) for method, path, name in ROUTES]
    return Starlette(routes=routes, exception_handlers=make_error_handlers({}))


class _Api:
    def __init__(self, parts: ApiDependencies) -> None:
        self._parts = parts
        self._controller = parts.status.controller
        self._pool = SmallPool("control API", at_once=8, waiting=256)

    async def status(self, request: Request) -> Response:
        self._check_token(request)
        status = await self._pool.run(describe_status, self._parts.status, self._parts.addresses)
        parts = self._parts
        live = {"queue": parts.describe_queue(), "sharing": parts.read_sharing(), "reconciled": parts.reconciled.is_set()}
        return JSONResponse({**status, **live})

    async def slo(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse({**self._parts.read_scores(), "sharing": self._parts.read_sharing()})

    async def snapshot(self, request: Request) -> Response:
        self._check_token(request)
        snapshot = await self._pool.run(self._controller.snapshot)
        return JSONResponse(snapshot_to_json(snapshot))

    async def apply(self, request: Request) -> Response:
        self._check_token(request)
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        text, base = body.get("stack"), body.get("base_directory")
        if not isinstance(text, str) or not isinstance(base, str | None):
            raise InvalidInput("apply needs {stack: text, base_directory: path}")
        stack = parse_stack(text, base_directory=Path(base) if base else None)
        self._parts.check_gpus(stack)
        dry_run, prune = (request.query_params.get(name) in ("1", "true") for name in ("dry_run", "prune"))
        await self._parts.reconciled.wait()
        launcher = request.query_params.get("launcher")
        deployments = unmask(stack.deployments, self._controller.deployments())
        deployments = [replace(one, launcher=launcher) for one in deployments] if launcher else deployments
        make_room = request.query_params.get("make_room") in ("1", "true")
        queue = QueueSettings() if prune and stack.queue is None else stack.queue

        def work(emit: Emit) -> None:
            models = () if dry_run else [one for one in deployments if one.overrides.program is None]
            with self._parts.expect(models):
                outcome = self._controller.apply(deployments, emit=emit, dry_run=dry_run, prune=prune, make_room=make_room)
            if queue is not None and not outcome.plan.refusals:
                self._change_queue(queue, emit, dry_run=dry_run)

        return _event_stream(work)

    async def exec(self, request: Request) -> Response:
        """One program, for a caller that becomes it, or to be started here; the stream ends with what it is started with."""
        self._check_token(request)
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        text, base, named = body.get("stack"), body.get("base_directory"), body.get("named", False)
        argv, environment = body.get("argv"), body.get("environment", {})
        detach, wait_seconds = body.get("detach", False), body.get("wait_seconds", 0)
        if not (isinstance(text, str) and isinstance(base, str) and isinstance(named, bool) and isinstance(detach, bool)):
            raise InvalidInput("exec needs {stack: text, base_directory: path, named: bool, detach: bool}")
        if not (isinstance(argv, list) and argv and argv[0] and all(map(_is_word, argv))):
            raise InvalidInput("argv is a list of words, of which the first names a program")
        if not isinstance(environment, dict) or not all(
            name and "=" not in name and _is_word(name) and _is_word(value) for name, value in environment.items()
        ):
            raise InvalidInput("environment is {NAME: text}")
        if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds <= _LONGEST_WAIT_SECONDS:
            raise InvalidInput(f"wait_seconds is not a number from 0 to {_LONGEST_WAIT_SECONDS}")
        asker = decode(ProcessIdentity, body.get("asker"), "asker")
        stack = parse_stack(text, source="exec", base_directory=Path(base))
        self._parts.check_gpus(stack)
        program = stack.deployments[0].overrides.program if len(stack.deployments) == 1 else None
        if program is None:
            raise InvalidInput("exec takes one program")
        await self._parts.reconciled.wait()
        program = replace(program, argv=tuple(argv), caller=None if detach else asker)
        overrides = replace(stack.deployments[0].overrides, program=program, environment=tuple(environment.items()))
        deployment = replace(stack.deployments[0], overrides=overrides)
        return _event_stream(lambda emit: self._parts.line.run(deployment, wait_seconds, emit, named=named, asker=asker))

    def _change_queue(self, settings: QueueSettings, emit: Emit, *, dry_run: bool) -> None:
        if settings == self._parts.queue.read():
            return
        text = "would change the bounds of the queue" if dry_run else "changed the bounds of the queue; `aimgpu slo` shows them"
        if not dry_run:
            self._parts.queue.change(settings)
        emit(Event(kind=EventKind.STEP, text=text))

    async def release(self, request: Request) -> Response:
        self._check_token(request)
        names = (await read_json(request, most_bytes=_LARGEST_BODY)).get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidInput("release needs {names: [...]}")
        await self._parts.reconciled.wait()
        await run_in_thread(lambda: self._controller.release(names), _LONG)
        return JSONResponse({"released": names})

    async def partition(self, request: Request) -> Response:
        self._check_token(request)
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        device, layout, reload = body.get("device"), body.get("layout"), body.get("reload_driver", False)
        if not isinstance(device, str) or not isinstance(layout, str) or not isinstance(reload, bool):
            raise InvalidInput("partition needs {device: id, layout: name, reload_driver: bool}")
        await self._parts.reconciled.wait()
        if request.query_params.get("dry_run") in ("1", "true"):
            change = await self._pool.run(self._controller.change_layout, device, layout, dry_run=True)
            return JSONResponse(change.to_json())
        return _event_stream(lambda emit: self._controller.change_layout(device, layout, reload_driver=reload, emit=emit))

    async def resize(self, request: Request) -> Response:
        self._check_token(request)
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        name, size = body.get("model"), body.get("memory_bytes")
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise InvalidInput("resize needs {model: name, memory_bytes: whole number}")
        await self._parts.reconciled.wait()
        dry_run = request.query_params.get("dry_run") in ("1", "true")
        done = await run_in_thread(lambda: self._controller.resize(name, size, dry_run=dry_run), _LONG)
        return JSONResponse({**done.to_json(), "dry_run": dry_run})

    async def stop(self, request: Request) -> Response:
        self._check_token(request)
        await self._parts.reconciled.wait()
        names = [deployment.name for deployment in self._controller.deployments()]
        await run_in_thread(lambda: self._controller.release(final=True), _LONG)
        await self._pool.run(self._parts.queue.change, QueueSettings())
        self._parts.stop()
        return JSONResponse({"released": names})

    async def log(self, request: Request) -> Response:
        self._check_token(request)
        instance_id = request.path_params["instance_id"]
        known = {instance.id for instance in self._controller.instances()}
        if instance_id not in known:
            raise UnknownDeployment(f"no instance {instance_id}", hint=f"Known: {', '.join(sorted(known)) or 'none'}.")
        lines = _whole(request.query_params.get("lines", "100"), "lines", _MOST_LOG_LINES)
        path = self._parts.status.runs / instance_id / "engine.log"
        if request.query_params.get("follow") not in ("1", "true"):
            return Response(await self._pool.run(read_tail, path, lines), media_type="text/plain; charset=utf-8")

        def is_known() -> bool:
            try:
                found = (instance for instance in self._controller.instances() if instance.id == instance_id)
                return any(instance.state is not InstanceState.ENDED for instance in found)
            except AimGpuError:  # the daemon is ending, and the ledger is closed
                return False

        return StreamingResponse(follow_log(path, lines, is_known), media_type="text/plain; charset=utf-8")

    def _check_token(self, request: Request) -> None:
        given = bearer_token(request.headers.get("authorization", "").encode()) or b""
        if not hmac.compare_digest(given, self._parts.token.encode()):
            raise NotAllowed(
                "the control API needs the daemon's token", hint="Run the command as the user who started the daemon."
            )


def _event_stream(work: Callable[[Callable[[Event], None]], object]) -> StreamingResponse:
    """Run it in a thread and send its events, a line each. A caller who leaves does not stop the work."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def put(item: dict[str, Any] | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def put_error(error: AimGpuError) -> None:
        put({"event": EventKind.ERROR.value, "text": error.message, **error.to_json()})

    def run() -> None:
        try:
            work(lambda event: put(event.to_json()))
            put(Event(kind=EventKind.DONE, text="done").to_json())
        except AimGpuError as error:
            put_error(error)
        except OSError as error:
            put_error(from_os_error(error))
        except Exception:
            put_error(
                AimGpuError("the daemon failed: this is a fault of aimgpu", hint="Its log has the details; please report it.")
            )
            raise
        finally:
            put(None)

    async def lines() -> AsyncIterator[bytes]:
        running = asyncio.ensure_future(run_in_thread(run, _LONG))
        while (item := await queue.get()) is not None:
            yield json.dumps(item).encode() + b"\n"
        await running

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _whole(text: str, name: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or int(text) > most:
        raise InvalidInput(f"{name}={text[:20]!r} is not a whole number up to {most}")
    return int(text)


def _is_word(value: object) -> bool:
    """Whether a process can be given it."""
    return isinstance(value, str) and "\0" not in value
