"""llama.cpp's own image: the same model and settings by the flags of `llama-server`."""

from pathlib import Path

from aimgpu.engines.endpoint import choose_port, write_endpoint
from aimgpu.engines.launch_environment import choose_image, model_mounts
from aimgpu.engines.llamacpp.arguments import QUIET, server_arguments
from aimgpu.engines.protocols import Command, LaunchRequest, Mount

IMAGES = {
    "amd": "ghcr.io/ggml-org/llama.cpp:server-rocm",
    "nvidia": "ghcr.io/ggml-org/llama.cpp:server-cuda",
    "cpu": "ghcr.io/ggml-org/llama.cpp:server",
}


def container_command(request: LaunchRequest, model_path: Path) -> Command:
    """The command inside the image for the granted GPU."""
    port = request.port or choose_port()
    write_endpoint(request.run_directory, port)
    return Command(
        argv=("/app/llama-server", *server_arguments(request, model_path, port)),
        environment={**QUIET, **request.environment},
        image=choose_image(IMAGES, request),
        device_nodes=request.device_nodes,
        port=port,
        mounts=(*model_mounts(request), *(Mount(path=each.path) for each in request.overrides.adapters)),
        secrets={"LLAMA_API_KEY": request.api_key},
    )
