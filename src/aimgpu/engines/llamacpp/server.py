"""The child process: one model behind llama.cpp's own HTTP server, until SIGTERM.

Usage: python -m aimgpu.engines.llamacpp.server SETTINGS.json [--embedding | --reranking]. The key comes in AIMGPU_ENGINE_KEY.
SIGTERM keeps its default action, so that the process ends at once: caught in Python, open streams would hang until their
clients give up.
"""

import json
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xllamacpp

from aimgpu.engines.llamacpp.purpose import FLAGS, Purpose
from aimgpu.files import write_private

KEY_VARIABLE = "AIMGPU_ENGINE_KEY"
ENDPOINT_NAME = "endpoint.json"
_FLASH_ATTENTION = {
    "auto": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


def main(arguments: list[str]) -> int:
    """Serve one model until a signal ends the process."""
    settings = json.loads(Path(arguments[0]).read_bytes())
    endpoint = Path(settings["run_directory"]) / ENDPOINT_NAME
    write_private(endpoint, json.dumps({"state": "loading", "pid": os.getpid()}))
    say(f"loading {settings['model_path']}: {settings['slots']} slots, {settings['context_tokens']} tokens of context in all")
    asked = [FLAGS[each.removeprefix("--")] for each in arguments[1:] if each.removeprefix("--") in FLAGS]
    purpose = asked[-1] if asked else Purpose(settings["purpose"])
    settings |= {"purpose": purpose, "pools_mean": asked == [Purpose.EMBEDDING]}  # a model that makes text names no pooling
    server = xllamacpp.Server(server_parameters(settings, os.environ.pop(KEY_VARIABLE)))  # returns when the model is loaded
    answer_once(server, purpose)
    say(f"ready at {server.listening_address}")
    write_private(endpoint, json.dumps({"state": "listening", "pid": os.getpid(), "url": server.listening_address}))
    while True:
        signal.pause()


def server_parameters(settings: dict[str, Any], api_key: str) -> "xllamacpp.CommonParams":
    """The wheel's parameters from the settings file."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["model_path"]
    parameters.model_alias = {settings["alias"]}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0  # the kernel chooses: no race for a port
    parameters.api_keys = [api_key]
    parameters.ui = False
    parameters.cors_origins = ""  # the default lets every web page in
    parameters.cache_ram_mib = 0  # the default keeps up to 8 GiB of prompts that no footprint knows of
    parameters.endpoint_metrics = True
    parameters.verbosity = 1
    parameters.fit_params = False  # what was sized is what is used
    parameters.n_ctx = settings["context_tokens"]  # of all slots together
    parameters.n_parallel = settings["slots"]
    parameters.n_threads_http = settings["slots"] + 4
    parameters.cpuparams.n_threads = settings["threads"]
    parameters.cpuparams_batch.n_threads = settings["threads"]
    parameters.flash_attn_type = _FLASH_ATTENTION[settings["flash_attention"]]
    parameters.cache_type_k, parameters.cache_type_v = (
        getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}") for name in settings["cache_types"]
    )
    purpose = settings.get("purpose", Purpose.TEXT)
    parameters.embedding = purpose != Purpose.TEXT
    if purpose == Purpose.RANKING:
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    elif settings.get("pools_mean"):
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    # Without effect until a request names one: the wheel reads the scale, not lora_init_without_apply.
    parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 0.0) for path in settings.get("adapters", ())]
    for name, value in settings["parameters"].items():
        setattr(parameters, name, value)
    for name, value in settings["sampling"].items():
        setattr(parameters.sampling, name, value)
    return parameters


def answer_once(server: "xllamacpp.Server", purpose: Purpose = Purpose.TEXT) -> None:
    """A model that loads but cannot compute must not be called ready."""
    if purpose is Purpose.RANKING:
        answer, wanted = server.handle_rerank({"query": "a", "documents": ["a"]}), "results"
    elif purpose is Purpose.EMBEDDING:
        answer, wanted = server.handle_embeddings({"input": "a"}), "data"
    else:
        answer, wanted = server.handle_completions({"prompt": "a", "max_tokens": 1}), "choices"
    if wanted not in answer:
        raise SystemExit(f"the model loaded but computed nothing: {json.dumps(answer)[:300]}")


def say(text: str) -> None:
    """Into the log: llama.cpp itself is set to print errors only, which keeps a busy log small."""
    sys.stdout.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
