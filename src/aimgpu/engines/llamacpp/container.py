"""llama.cpp's own image: the same model and settings by the flags of `llama-server`."""

from pathlib import Path

from aimgpu.engines.endpoint import choose_port, write_endpoint
from aimgpu.engines.flags import as_arguments, normalise_flags
from aimgpu.engines.protocols import Command, LaunchRequest
from aimgpu.engines.surroundings import choose_image, model_mounts

IMAGES = {
    "amd": "ghcr.io/ggml-org/llama.cpp:server-rocm",
    "nvidia": "ghcr.io/ggml-org/llama.cpp:server-cuda",
    "cpu": "ghcr.io/ggml-org/llama.cpp:server",
}


def container_command(request: LaunchRequest, model_path: Path) -> Command:
    footprint = request.footprint
    port = request.port or choose_port()
    write_endpoint(request.run_directory, port)
    slots = {"parallel": str(footprint.concurrency), "ctx-size": str(footprint.context_tokens * footprint.concurrency)}
    flags = {**slots, **normalise_flags(footprint.flags), "cache-ram": "0", "no-webui": "true", "metrics": "true"}
    flags["log-verbosity"] = "4"  # buffer sizes, which later estimates learn from, are told from here on
    where = ("--host", "127.0.0.1", "--port", str(port), "--alias", request.instance.deployment)
    return Command(
        argv=("/app/llama-server", "--model", str(model_path.resolve()), *where, *as_arguments(flags)),
        environment=dict(request.environment),
        image=choose_image(IMAGES, request),
        device_nodes=request.device_nodes,
        mounts=model_mounts(request),
        secrets={"LLAMA_API_KEY": request.api_key},
    )
