"""CPU time per request of the gateway's own code, without sockets: this checkout beside another, in short interleaved batches.

`make bench-gateway` measures through sockets, where the kernel and the neighbours of a shared machine cost more than the
difference that is looked for. Here both ends are transports in memory, each batch is a few hundred requests, and the fastest
tenth of the batches counts: what slows a batch down comes from outside.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from benchmarks.recording import write_result

try:
    from benchmarks.gateway import ours
except ImportError:  # a checkout in which benchmarks were single files
    ours = import_module("benchmarks.gateway_ours")

_BODY = {"model": "m", "messages": [{"role": "user", "content": "Say hello to everybody"}]}
_JSON = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"Hello! How can I help you today?"}}],'
    b'"usage":{"prompt_tokens":12,"completion_tokens":9,"total_tokens":21}}'
)
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
_READS = 10  # in how many pieces a stream of 50 events comes
_KINDS = ("json", "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--requests", type=int, default=200, help="of each batch")
    parser.add_argument("--connections", type=int, default=1, help="requests at once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        uvloop.install()
        asyncio.run(_serve_batches(given.connections))
        return
    checkouts = {"now": Path(__file__).resolve().parents[2]} | ({"before": given.before.resolve()} if given.before else {})
    children = {name: _start(checkout, given.connections) for name, checkout in checkouts.items()}
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds):
        for kind in _KINDS:
            for name, child in children.items():
                taken.setdefault((kind, name), []).append(_ask(child, f"{kind} {given.requests}") / given.requests * 1e6)
    for child in children.values():
        child.terminate()
        child.wait()
    figures: dict[str, float] = {}
    for (kind, name), values in taken.items():
        figures[f"{kind} {name}, us"] = round(_fast(values), 2)
        print(f"{kind:7} {name:7} fastest tenth {_fast(values):7.2f} us, median {statistics.median(values):7.2f} us a request")
    for kind in _KINDS:
        if given.before:
            ratio = _fast(taken[kind, "now"]) / _fast(taken[kind, "before"])
            middle = statistics.median(taken[kind, "now"]) / statistics.median(taken[kind, "before"])
            figures |= {f"{kind} now / before": round(ratio, 3), f"{kind} now / before, median": round(middle, 3)}
            print(f"{kind:7} now / before: fastest tenth {ratio:.3f}, median {middle:.3f}")
    commits = [{"checkout": name, "commit": _commit(checkout)} for name, checkout in checkouts.items()]
    write_result("gateway_cpu", figures, commits, packages=("uvloop", "orjson", "httptools"))


def _commit(checkout: Path) -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def _fast(values: list[float]) -> float:
    return statistics.mean(sorted(values)[: max(1, len(values) // 10)])


def _start(checkout: Path, connections: int) -> "subprocess.Popen[str]":
    """This file with the package of that checkout, in its own environment where it has one."""
    paths = os.pathsep.join((str(checkout / "src"), str(checkout)))
    own = checkout / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    argv = [python, "-P", __file__, "--child", "--connections", str(connections)]
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def _ask(child: "subprocess.Popen[str]", line: str) -> float:
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018
    child.stdin.write(line + "\n")
    child.stdin.flush()
    return float(child.stdout.readline())


class _Transport(asyncio.Transport):
    """Passes on what is written; the other end is a function."""

    def __init__(self, written: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 4711), "sockname": ("127.0.0.1", 8080)})
        self.write = written  # type: ignore[method-assign,assignment]

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _stream_reads() -> list[bytes]:
    reads = [_chunked(_EVENT) * (50 // _READS) for _ in range(_READS)]
    reads[0] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + reads[0]
    reads[-1] += _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return reads


def _request(*, stream: bool) -> bytes:
    body = json.dumps(_BODY | ({"stream": True} if stream else {})).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ours.KEY}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _make_gateway() -> tuple[Any, Any]:
    """The application and the protocol that this checkout's benchmark serves."""
    given: dict[str, Any] = {}
    uvicorn.run = lambda gateway, **rest: given.update(rest, gateway=gateway)
    sys.argv = ["ours", "9", "0"]
    ours.main()
    return given["gateway"], given["http"]


class _Bench:
    """One gateway; as many callers and engine connections as there are requests at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: int) -> None:
        gateway, protocol = _make_gateway()
        config = uvicorn.Config(
            gateway, access_log=False, log_level="error", server_header=False, proxy_headers=False, ws="none"
        )
        config.load()
        self._loop = loop
        self._callers = [self._add_caller(protocol, config) for _ in range(connections)]
        self._pool = gateway._upstream  # noqa: SLF001
        for _ in range(connections):
            self._add_engine()
        json_answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_JSON) + _JSON
        self._answers = {"json": [json_answer], "stream": _stream_reads()}
        self._requests = {"json": _request(stream=False), "stream": _request(stream=True)}
        self._kind = "json"
        self._done: asyncio.Future[None] = loop.create_future()
        self._left = self._unasked = 0

    async def run(self, kind: str, count: int) -> float:
        """CPU seconds of so many requests."""
        self._kind, self._left, self._done = kind, count, self._loop.create_future()
        self._unasked = count - len(self._callers)
        began = time.process_time()
        for caller in self._callers:
            self._loop.call_soon(caller.data_received, self._requests[kind])
        await self._done
        return time.process_time() - began

    def _add_caller(self, protocol: Any, config: uvicorn.Config) -> Any:  # noqa: ANN401
        caller = protocol(config, ServerState(), {}, self._loop)
        caller.connection_made(_Transport(lambda data: self._answered(caller, data)))
        return caller

    def _add_engine(self) -> None:
        engine = sys.modules[type(self._pool).__module__]._Connection(self._pool, "http://127.0.0.1:9", self._loop)  # noqa: SLF001
        engine.connection_made(_Transport(lambda _data: self._asked(engine)))
        self._pool.put_idle(engine)

    def _asked(self, engine: Any) -> None:  # noqa: ANN401
        self._loop.call_soon(self._feed, engine, iter(self._answers[self._kind]))

    def _feed(self, engine: Any, reads: Any) -> None:  # noqa: ANN401
        data = next(reads, None)
        if data is not None:
            engine.data_received(data)
            self._loop.call_soon(self._feed, engine, reads)

    def _answered(self, caller: Any, data: bytes) -> None:  # noqa: ANN401
        if not data.endswith((b"0\r\n\r\n", b"}}")):
            return
        self._left -= 1
        if self._unasked > 0:
            self._unasked -= 1
            self._loop.call_soon(caller.data_received, self._requests[self._kind])
        elif not self._left:
            self._done.set_result(None)


async def _serve_batches(connections: int) -> None:
    bench = _Bench(asyncio.get_running_loop(), connections)
    for kind in _KINDS:
        await bench.run(kind, 500)
    while line := sys.stdin.readline():
        kind, _, count = line.partition(" ")
        print(await bench.run(kind, int(count)), flush=True)


if __name__ == "__main__":
    main()
