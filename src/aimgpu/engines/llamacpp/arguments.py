"""The command line of `llama-server`, on this machine or in its image: exactly what was sized."""

import os
from pathlib import Path

from aimgpu.domain import Footprint
from aimgpu.engines.flags import as_arguments, normalise_flags
from aimgpu.engines.launch_environment import listen_host, model_location
from aimgpu.engines.llamacpp.purpose import Purpose, find_purpose
from aimgpu.engines.models.packaged import find_packaged
from aimgpu.engines.protocols import LaunchRequest

LEAST_BUILD = 6975  # of November 2025: knows `--cache-ram` (#16391) and `--flash-attn on`
_FIT_BUILD = 8000  # knows `--fit`, which came in December 2025
QUIET = {"GGML_NO_BACKTRACE": "1"}  # pages of addresses would push the line that says why it died out of the last lines
_MOST_THREADS = 4  # with every layer on the GPU the CPU only looks tokens up; a thread a core, its default, is for inference


_FIXED = {
    "cache-ram": "0",  # its default keeps up to 8 GiB of prompts that no footprint knows of
    "no-webui": "true",
    "metrics": "true",
    "log-verbosity": "4",  # buffer sizes, which later estimates learn from, are printed from here on; prompts are not
}
FLAG_KEYS = {"parallel": "concurrency", "ctx-size": "context", "cache-type-k": "precision", "model": "model"}
_PLACED = ("model", "host", "port", "alias", "api-key", "lora", "lora-scaled", "lora-init-without-apply")


def own_flags(footprint: Footprint) -> dict[str, str]:
    """Flags that users cannot set themselves, as far as they are known before the start."""
    return {**dict.fromkeys(_PLACED, "..."), **_sized_flags(footprint), **_FIXED, "fit": "off"}


def server_arguments(request: LaunchRequest, model_path: Path, port: int, *, build: int = 0) -> tuple[str, ...]:
    """The arguments. `build` 0 is unknown: only flags that every build since LEAST_BUILD knows are used."""
    footprint = request.footprint
    packaged = find_packaged(request.instance.model)
    flags = {
        **_sized_flags(footprint),
        **({name.replace("_", "-"): str(value) for name, value in packaged.sampling.items()} if packaged else {}),
        **_FIXED,
    }
    if find_purpose(model_path, flags) is Purpose.RANKING:
        flags["reranking"] = "true"
    if build >= _FIT_BUILD:
        flags["fit"] = "off"
    where = ("--host", listen_host(request), "--port", str(port), "--alias", request.instance.deployment)
    adapters = [part for each in request.overrides.adapters for part in ("--lora", each.path)]
    apart = ("--lora-init-without-apply",) if adapters else ()  # each request says which it wants
    return ("--model", model_location(model_path), *where, *as_arguments(flags), *adapters, *apart)


def _sized_flags(footprint: Footprint) -> dict[str, str]:
    return {
        "parallel": str(footprint.concurrency),
        "ctx-size": str(footprint.context_tokens * footprint.concurrency),
        "n-gpu-layers": "999",
        "threads": str(min(_MOST_THREADS, os.cpu_count() or 1)),
        **normalise_flags(footprint.flags),
    }
