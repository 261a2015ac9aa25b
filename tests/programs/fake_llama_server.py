"""A stand-in for llama.cpp's `llama-server` on an NVIDIA GPU: its flags, its HTTP, its log and its ways to fail, without a GPU.

FAKE_LLAMA_SERVER, and the model file's name after each "+", hold words: slow (30 s of loading), dots (prints one a percent, as
builds of 2025 did), oom, kv-oom, no-blas (dies of its first long prompt), other-gpu, unknown-arch, no-gpu (warns and runs on
the CPU), port-taken-once, mute (never answers), crash-in-use, embedder, old (a build of 2024), unnumbered, cpu-build,
vulkan, deaf (ignores SIGTERM). The lines are those of build 11549 on an H200. What it is asked is kept in `asked` beside it.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from tests.programs import fake_engine

BUILD = 11549
VALUES = frozenset(
    [
        *("model", "host", "port", "alias", "ctx-size", "parallel", "batch-size", "ubatch-size", "n-gpu-layers", "flash-attn"),
        *("cache-type-k", "cache-type-v", "threads", "cache-ram", "log-verbosity", "fit", "dry-multiplier"),
    ]
)
SWITCHES = frozenset(["no-webui", "metrics", "kv-unified", "embedding"])
NO_MEMORY = "E ggml_backend_cuda_buffer_type_alloc_buffer: allocating {} MiB on device 0: cudaMalloc failed: out of memory"
DEATHS = {
    "oom": (
        f"0.00.301.011 {NO_MEMORY.format('5664.67')}",
        "0.00.301.020 E alloc_tensor_range: failed to allocate CUDA0 buffer of size 5939834880",
        "0.00.301.102 E llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "0.00.301.110 E llama_model_load_from_file_impl: failed to load model",
    ),
    "kv-oom": (
        f"0.00.620.094 {NO_MEMORY.format('68.01')}",
        "0.00.620.101 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 71317632",
        "0.00.620.103 E graph_reserve: failed to allocate compute buffers",
    ),
    "other-gpu": ("0.00.700.000 E CUDA error: no kernel image is available for execution on the device",),
    "unknown-arch": ("0.00.100.000 E llama_model_load: error loading model: unknown model architecture: 'nova'",),
}
NO_BLAS = (
    "/src/ggml/src/ggml-cuda/ggml-cuda.cu:109: CUDA error",
    "0.02.727.990 E CUDA error: the resource allocation failed",
    "0.02.727.995 E   cublasCreate_v2(&cublas_handles[device][curr_stream_no])",
)
SLOW = frozenset({"slow", "dots"})
NO_GPU = "warning: no usable GPU found, --gpu-layers option will be ignored"


class Handler(fake_engine.Handler):
    words: ClassVar[frozenset[str]]

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        if "embedder" in self.words and self.path == "/v1/completions":
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            message = "This server does not support completions."
            self._send(501, {"error": {"code": 501, "message": message, "type": "not_supported_error"}})
            return
        super().do_POST()

    def _answer(self, content: dict[str, Any]) -> None:
        if "no-blas" in self.words and len(str(content.get("prompt") or content.get("messages")).split()) > 16:
            say(*NO_BLAS)
            os.abort()  # in this thread: a signal to the process lets it answer first
        with Path("asked").open("a") as file:
            file.write(json.dumps(content) + "\n")
        super()._answer(content)


def main(arguments: list[str]) -> int:
    words = frozenset(os.environ.get("FAKE_LLAMA_SERVER", "").split())
    if arguments in (["--version"], ["--list-devices"]):
        return tell(arguments[0], words)
    options = parse_options(arguments)
    words |= frozenset(Path(options["model"]).stem.split("+")[1:])
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "no-gpu" in words:
        say(NO_GPU)
    else:
        say("0.00.129.410 I ggml_cuda_init: found 1 CUDA devices (Total VRAM: 3312 MiB):")
    once = Path("port-was-taken")
    if "port-taken-once" in words and not once.exists():
        once.touch()
        say(f"0.00.040.000 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {options['port']}")
        say("0.00.040.010 E srv  llama_server: exiting due to HTTP server error")
        return 1
    serve(options, words)
    if words & set(DEATHS):
        return die(words)
    if not words & SLOW:
        say("0.00.861.771 I srv  llama_server: model loaded")
    while True:
        signal.pause()


def tell(question: str, words: frozenset[str]) -> int:
    if question == "--version":
        number = 4000 if "old" in words else BUILD
        new = f"version: 0.6.0-dev (build {number}, commit sdist)"
        say("version: 0 (unknown)" if "unnumbered" in words else f"version: {number} (abc1234)" if "old" in words else new)
    else:
        kind = "Vulkan" if "vulkan" in words else "CUDA"
        device = "(none)" if "cpu-build" in words else f"{kind}0: NVIDIA H200 (143155 MiB, 142629 MiB free)"
        sys.stdout.write(f"Available devices:\n  {device}\n")
    return 0


def parse_options(arguments: list[str]) -> dict[str, str]:
    options, rest = {}, list(arguments)
    while rest:
        name = rest.pop(0).removeprefix("--")
        if name not in VALUES | SWITCHES or (name in VALUES and not rest):
            say(f"error: invalid argument: --{name}")
            raise SystemExit(1)
        options[name] = rest.pop(0) if name in VALUES else ""
    return options


def serve(options: dict[str, str], words: frozenset[str]) -> None:
    """Listens before it loads, and answers 503 meanwhile."""
    Handler.options = fake_engine.parse_options([".", *(["--mute"] if "mute" in words else [])])
    Handler.options.crash_after = 2 if "crash-in-use" in words else None  # the first is our own question for a token
    Handler.key = os.environ.get("LLAMA_API_KEY", "")
    Handler.words = words
    Handler.ready_at = time.monotonic() + (30 if words & SLOW else 0)
    server = fake_engine.Server((options["host"], int(options["port"])), Handler)
    say(f"0.00.043.341 I srv    load_model: loading model '{options['model']}'")
    if "dots" in words:
        sys.stderr.write("." * 42)
        sys.stderr.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()


def die(words: frozenset[str]) -> int:
    for word in sorted(words & set(DEATHS)):
        say(*DEATHS[word])
    say("0.00.621.393 E srv  llama_server: exiting due to model loading error")
    return 1


def say(*lines: str) -> None:
    sys.stderr.write("".join(line + "\n" for line in lines))
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
