"""Loads a GGUF file with the wheel's llama.cpp, which prints its buffers. Usage: python llamacpp_buffers.py SETTINGS-JSON"""

import json
import sys
from typing import Any

import xllamacpp


def main(settings: dict[str, Any]) -> int:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["path"]
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.verbosity = 5  # buffer sizes are told from 4 on
    parameters.fit_params = False
    parameters.warmup = False
    parameters.no_extra_bufts = True  # weights as a GPU would hold them, not repacked for the CPU
    parameters.n_ctx = settings["context"]
    parameters.n_parallel = settings["slots"]
    parameters.n_ubatch = settings["ubatch"]
    parameters.n_batch = max(2048, settings["ubatch"])
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    attention = xllamacpp.llama_flash_attn_type
    parameters.flash_attn_type = (
        attention.LLAMA_FLASH_ATTN_TYPE_ENABLED if settings["flash"] else attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['kv'].upper()}")
    parameters.cache_type_k = parameters.cache_type_v = kind
    xllamacpp.Server(parameters)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
