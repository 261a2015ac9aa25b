"""A stand-in for `vllm`: its flags, its HTTP paths, its log and its ways to fail, without a GPU.

FAKE_VLLM, and the model's name after each "+", hold words: oom, no-kv, two-at-once, port-taken, port-taken-once, slow (30 s
of loading), hang (never answers), crash-in-use, deaf (ignores SIGTERM), sleep-fails, sleep-hangs, wake-fails, wake-hangs,
dies-at-wake, slow-turns (half a second for each). Every sleep and wake that it is asked for is a line in `sleeps` in its
folder; a request in its sleep ends it, as it may.
"""

import argparse
import asyncio
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tests.programs import fake_engine

VERSION = "0.19.0"
OUT_OF_MEMORY = (
    "(EngineCore pid=43) torch.OutOfMemoryError: HIP out of memory. Tried to allocate 192.00 GiB. GPU 0 has a total capacity "
    "of 15.98 GiB of which 11.56 GiB is free. Of the allocated memory 3.97 GiB is allocated by PyTorch, and 26.98 MiB is "
    "reserved by PyTorch but unallocated."
)
NO_CACHE = (
    "(EngineCore pid=43) ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine."
)
TWO_AT_ONCE = (
    "(EngineCore pid=43) ERROR 09-28 15:47:24 [core.py:718] ValueError: Free memory on device (3.22/4.0 GiB) on startup is "
    "less than desired GPU memory utilization (0.9, 3.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
    "other processes."
)
FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': 1}"


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("--version", action="version", version=VERSION)
    serve = parser.add_subparsers(dest="verb", required=True).add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--host", default="0.0.0.0")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--served-model-name", nargs="+")
    for name in ("disable-access-log-for-endpoints", "shutdown-timeout", "kv-transfer-config"):  # as KServe's templates pass
        serve.add_argument(f"--{name}")
    serve.add_argument("--api-key")
    serve.add_argument("--middleware", action="append", default=[])
    serve.add_argument("--dtype")
    serve.add_argument("--quantization")
    serve.add_argument("--kv-cache-dtype")
    serve.add_argument("--scheduling-policy", choices=["fcfs", "priority"])
    serve.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    for name in ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-memory-bytes", "tensor-parallel-size"):
        serve.add_argument(f"--{name}", type=int)
    serve.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
    for name in ("enforce-eager", "enable-sleep-mode", "trust-remote-code", "disable-uvicorn-access-log"):
        serve.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments)


class Handler(fake_engine.Handler):
    model: ClassVar[str]
    dev_mode: ClassVar[bool]
    asleep: ClassVar[bool] = False
    words: ClassVar[frozenset[str]]
    middleware: ClassVar[list[Any]]

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        path = urlsplit(self.path).path
        if not self._let_in(path):
            return
        if path == "/health" and "hang" not in self.words:
            self._empty(200)
        elif path == "/is_sleeping" and self.dev_mode:
            self._send(200, {"is_sleeping": Handler.asleep})
        elif path == "/v1/models" and self._allowed():
            self._send(200, {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": 512}]})
        else:
            super().do_GET()

    def do_POST(self) -> None:  # noqa: N802
        path = urlsplit(self.path).path
        if not self._let_in(path):
            return
        if path in ("/sleep", "/wake_up", "/collective_rpc") and self.dev_mode:
            self._turn(path)
        elif path in ("/sleep", "/wake_up", "/collective_rpc"):
            self._send(404, {"detail": "Not Found"})
        elif Handler.asleep:
            os._exit(139)
        else:
            super().do_POST()

    def _let_in(self, path: str) -> bool:
        """Whether every middleware passes the request on; vLLM puts them around an ASGI application."""
        passed: list[str] = []
        answered: list[dict[str, Any]] = []

        async def application(*_: object) -> None:
            passed.append(path)

        async def send(message: dict[str, Any]) -> None:
            answered.append(message)

        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        layers = functools.reduce(lambda inner, one: one(inner), self.middleware, application)
        asyncio.run(layers({"type": "http", "path": path, "headers": headers}, None, send))
        if not passed:
            self._send(answered[0]["status"], json.loads(answered[1]["body"]))
        return bool(passed)

    def _turn(self, path: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        with Path("sleeps").open("a") as file:
            file.write(f"{self.path} {body}\n")
        verb = "sleep" if path == "/sleep" else "wake"
        if "slow-turns" in self.words:
            time.sleep(0.5)
        if f"{verb}-hangs" in self.words:
            threading.Event().wait()
        if f"dies-at-{verb}" in self.words:
            os._exit(1)
        if f"{verb}-fails" in self.words:
            self._send(500, {"detail": "CUDA Error: out of memory"})
            return
        if path != "/collective_rpc" and "tags=weights" not in self.path:
            Handler.asleep = verb == "sleep"
        self._empty(200)

    def _answer(self, content: dict[str, Any]) -> None:
        if content.get("model") != self.model:
            message = f"The model `{content.get('model')}` does not exist."
            self._send(404, {"error": {"message": message, "type": "NotFoundError", "code": 404}})
            return
        super()._answer(content)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main(arguments: list[str]) -> int:
    words = frozenset(os.environ.get("FAKE_VLLM", "").split())
    options = parse_options(arguments)
    words |= frozenset(getattr(options, "model", "").split("+")[1:])
    say(f"(APIServer pid={os.getpid()}) INFO 10-29 02:14:54 [api_server.py:1870] vLLM API server version {VERSION}")
    if os.getpid() == 1:  # of a container, where signals without a handler are ignored
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for word, line in {"oom": OUT_OF_MEMORY, "no-kv": NO_CACHE, "two-at-once": TWO_AT_ONCE}.items():
        if word in words:
            say(line)
            say(FAILED)
            return 1
    once = Path("port-was-taken")
    if "port-taken" in words or ("port-taken-once" in words and not once.exists()):
        once.touch()
        say(f"OSError: [Errno 98] Address already in use: ('127.0.0.1', {options.port})")
        return 1
    for percent, shard in ((0, 0), (50, 1)):
        say(f"Loading safetensors checkpoint shards: {percent:3}% Completed | {shard}/2 [00:00<?, ?it/s]")
    if "slow" in words:
        time.sleep(30)
    say("Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:02<00:00,  1.19s/it]")
    report(options)
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Handler.options = fake_engine.parse_options([".", *(["--mute"] if "hang" in words else [])])
    if "crash-in-use" in words:
        Handler.options.crash_after = 2  # the first is our own question for a token
    Handler.key = options.api_key or os.environ.get("VLLM_API_KEY", "")
    Handler.model = options.served_model_name[0] if options.served_model_name else options.model
    Handler.dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1" and options.enable_sleep_mode
    Handler.words = words
    places = [name.rsplit(".", 1) for name in options.middleware]
    Handler.middleware = [getattr(importlib.import_module(module), name) for module, name in places]
    server = fake_engine.Server((options.host, options.port), Handler)
    say("(APIServer pid=1) INFO:     Application startup complete.")
    try:
        server.serve_forever()
    finally:
        core.kill()
    return 0


def report(options: argparse.Namespace) -> None:
    cache = (options.kv_cache_memory_bytes or 0) / (1 << 30) or 0.56
    say("(EngineCore pid=258) INFO gpu_model_runner.py:4879 Model loading took 2.89 GiB memory and 60.297843 seconds")
    say(f"(EngineCore pid=258) INFO gpu_worker.py:440 Available KV cache memory: {cache:.2f} GiB")
    say("(EngineCore pid=258) INFO kv_cache_utils.py:1708 GPU KV cache size: 20,992 tokens")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
