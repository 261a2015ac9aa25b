"""Where vLLM keeps what it compiled: one folder per model and settings, so that a second start finds what fits it."""

import hashlib
import json
from pathlib import Path

from aimgpu.engines.protocols import LaunchRequest
from aimgpu.files import cache_directory

# Sizes of memory change from start to start and compile nothing.
_WITHOUT_EFFECT = frozenset({"kv-cache-memory-bytes", "gpu-memory-utilization", "num-gpu-blocks-override"})


def compile_cache(request: LaunchRequest, flags: dict[str, str]) -> Path:
    """The folder; vLLM makes it. Its name begins with the model's, for people who look for what takes space."""
    settings = {name: value for name, value in flags.items() if name not in _WITHOUT_EFFECT}
    parts = [
        request.instance.model,
        str(request.model_path or ""),
        request.footprint.engine_version or "",
        request.footprint.gpu or "",
        sorted(settings.items()),
        request.overrides.arguments,
        request.overrides.environment,
        request.overrides.image,
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    name = "".join(char if char.isalnum() or char in "._-" else "-" for char in request.instance.model.rsplit("/", 1)[-1])
    return cache_directory() / "vllm" / f"{name[:60]}-{digest}"
