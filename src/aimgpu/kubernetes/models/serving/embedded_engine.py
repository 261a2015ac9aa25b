"""``python -m aimgpu.kubernetes.models.serving.embedded_engine``: fetch a model and serve it with llama.cpp, in a pod.

On a GPU where the image has a `llama-server` that can use it, else with the wheel on the CPU. It asks for the key in
LLAMA_API_KEY, and for none where that is not set.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aimgpu.control.sizing_inputs.model_files import read_local_model
from aimgpu.engines.llamacpp.program import Program, find_program
from aimgpu.engines.llamacpp.purpose import Purpose, find_purpose
from aimgpu.engines.models.packaged import find_packaged
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.errors import AimGpuError
from aimgpu.sizing.model import ModelKind

_CONTEXT, _CONCURRENCY = 4096, 1
_HOST = "0.0.0.0"  # noqa: S104 - the gateway is another pod


def main(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # process 1 of a container ignores signals without a handler
    try:
        model = LocalModelStore(given.cache).fetch(given.model, _report)
    except AimGpuError as error:
        print(f"error: {error.message}\n{error.hint or ''}", file=sys.stderr)  # noqa: T201 - the pod's log
        return error.exit_status
    program, purpose = find_program(), model_purpose(model.path)
    if isinstance(program, Program):
        os.execv(program.path, [program.path, *server_words(given, model.path, purpose)])  # noqa: S606 - becomes the engine
    return _serve_on_cpu(given, model.path, purpose)


def model_purpose(path: Path) -> Purpose:
    """An encoder makes vectors or scores, as its file says; everything else makes text."""
    try:
        shape = read_local_model(path).architecture
    except AimGpuError:
        return Purpose.TEXT  # the engine reports what is wrong with the file
    encodes = shape is not None and shape.kind is ModelKind.ENCODER
    return find_purpose(path, {"embedding": "true"} if encodes else {})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve one model with llama.cpp.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True, help="what callers name it")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--context", type=int, default=_CONTEXT, help="tokens of one request")
    parser.add_argument("--concurrency", type=int, default=_CONCURRENCY, help="requests at once")
    parser.add_argument("--cache", type=Path, required=True, help="folder for downloaded models")
    return parser.parse_args(arguments)


def server_words(given: argparse.Namespace, path: Path, purpose: Purpose) -> list[str]:
    """The command line of a `llama-server`."""
    sizes = {"parallel": given.concurrency, "ctx-size": given.context * given.concurrency, "n-gpu-layers": 999, "cache-ram": 0}
    words = ["--model", str(path), "--alias", given.name, "--host", _HOST, "--port", str(given.port), "--metrics", "--no-webui"]
    purposes = {Purpose.TEXT: [], Purpose.EMBEDDING: ["--embedding"], Purpose.RANKING: ["--embedding", "--reranking"]}
    return [*words, *(word for name, value in sizes.items() for word in (f"--{name}", str(value))), *purposes[purpose]]


def _serve_on_cpu(given: argparse.Namespace, path: Path, purpose: Purpose) -> int:
    import xllamacpp  # noqa: PLC0415 - an image with a llama-server need not have the wheel

    from aimgpu.engines.llamacpp.server import answer_once, say, server_parameters  # noqa: PLC0415

    packaged = find_packaged(given.model)
    settings: dict[str, Any] = {
        "model_path": str(path),
        "alias": given.name,
        "slots": given.concurrency,
        "context_tokens": given.context * given.concurrency,
        "threads": max(1, len(os.sched_getaffinity(0))),
        "flash_attention": "auto",
        "cache_types": ("f16", "f16"),
        "parameters": {},
        "purpose": purpose,
        "sampling": dict(packaged.sampling) if packaged else {},
    }
    key = os.environ.get("LLAMA_API_KEY", "")  # as llama-server reads it
    parameters = server_parameters(settings, key)
    parameters.hostnames, parameters.port, parameters.api_keys = [_HOST], given.port, [key] if key else []
    server = xllamacpp.Server(parameters)
    answer_once(server, purpose)
    say(f"ready at {server.listening_address}")
    while True:
        signal.pause()


def _report(what: str, done: int, total: int | None) -> None:
    """A line for every tenth of a download; a log is not a terminal."""
    if total and done * 10 // total != max(done - (1 << 20), 0) * 10 // total:
        print(f"{what}: {done * 100 // total}%", flush=True)  # noqa: T201 - the pod's log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
