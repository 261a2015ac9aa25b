"""Reads from an engine's start-up log what it says that it allocated, by the names of the terms."""

import re
from collections.abc import Iterable

from aimgpu.units import GIB, MIB

_LONGEST_LINE = 2000
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
# vLLM: before and after the V1 engine, each its own words.
_VLLM = (
    (
        "weights",
        re.compile(rf"(?:model loading took|loading model weights took|model weights take) {_NUMBER} ?GiB", re.IGNORECASE),
    ),
    ("activations", re.compile(rf"pytorch activation peak memory takes {_NUMBER} ?GiB", re.IGNORECASE)),
    ("engine", re.compile(rf"non_torch_memory takes {_NUMBER} ?GiB", re.IGNORECASE)),
    ("graphs", re.compile(rf"graph capturing finished in .{{0,40}}took {_NUMBER} ?GiB", re.IGNORECASE)),
    ("kv_cache", re.compile(rf"reserved {_NUMBER} ?GiB memory for kv cache", re.IGNORECASE)),  # given in bytes
    ("kv_cache", re.compile(rf"(?:available kv cache memory|reserved for kv cache is)[: ]+{_NUMBER} ?GiB", re.IGNORECASE)),
)
# llama.cpp prints one line a buffer and device; those of the host are not on the GPU.
_LLAMACPP = re.compile(rf"\b(\S+?) +(model|KV|RS|compute) buffer size *= *{_NUMBER} *MiB")
_LLAMACPP_TERMS = {"model": "weights", "KV": "kv_cache", "RS": "kv_cache", "compute": "activations"}
_HOSTS = ("CPU", "BLAS")


def read_log_lines(engine: str, lines: Iterable[str]) -> dict[str, int]:
    """Bytes by term; terms that the log does not report are absent."""
    found: dict[str, int] = {}
    for line in lines:
        text = line[:_LONGEST_LINE]
        if engine == "vllm":
            for term, pattern in _VLLM:
                match = pattern.search(text)
                if match and float(match[1]) >= 0:
                    found[term] = round(float(match[1]) * GIB)
        elif engine in ("llamacpp", "ollama"):
            _add_buffer(found, text)
    return found


def _add_buffer(found: dict[str, int], text: str) -> None:
    match = _LLAMACPP.search(text)
    if match is None or match[1].startswith(_HOSTS) or match[1].endswith("_Host"):
        return
    size = round(float(match[3]) * MIB)
    term = _LLAMACPP_TERMS[match[2]]
    if term == "weights" and "activations" in found:
        found.clear()  # a second load begins: the one before was a dry run, which prints state and compute buffers too
    if size > 0:
        found[term] = found.get(term, 0) + size
