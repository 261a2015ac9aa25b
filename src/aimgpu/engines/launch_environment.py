"""What engines take from the daemon's own environment, and how they differ inside a container."""

import os
from collections.abc import Mapping
from pathlib import Path

from aimgpu.engines.protocols import LaunchRequest, Mount

_HUB = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")
_HUB_SECRETS = ("HF_TOKEN",)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def is_container(request: LaunchRequest) -> bool:
    """Whether the engine runs in a container."""
    return request.instance.launcher == "docker"


def listen_host(request: LaunchRequest) -> str:
    """Loopback; in a container every address of its own network, of which one port is published on the machine's loopback."""
    return "0.0.0.0" if is_container(request) else "127.0.0.1"  # noqa: S104


def sees_gpu(request: LaunchRequest) -> bool:
    """Whether it was granted a part of a real GPU; a simulated one names none to the engine."""
    return _vendor(request) != "cpu"


def choose_image(images: Mapping[str, str], request: LaunchRequest) -> str:
    """The image for the vendor of the granted partition, "cpu" where there is none."""
    return images[_vendor(request)]


def _vendor(request: LaunchRequest) -> str:
    if "/dev/kfd" in request.device_nodes or "ROCR_VISIBLE_DEVICES" in request.environment:
        return "amd"
    return "nvidia" if "CUDA_VISIBLE_DEVICES" in request.environment else "cpu"


def hub_folder() -> Path:
    """Where models of the Hugging Face hub are kept, by the rules of its own library."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").expanduser().absolute()


def hub_environment() -> dict[str, str]:
    """Settings of the Hugging Face hub from the daemon's own environment."""
    return {name: os.environ[name] for name in _HUB if name in os.environ}


def network_secrets() -> dict[str, str]:
    """Tokens and proxies, which may hold passwords: never printed."""
    return {name: os.environ[name] for name in (*_HUB_SECRETS, *_PROXIES) if name in os.environ}


def model_location(path: Path) -> str:
    """Absolute, and under the name it has: parts of a split model are found by it, and files in the hub's cache are links."""
    return str(path.parent.resolve() / path.name)


def model_mounts(request: LaunchRequest) -> tuple[Mount, ...]:
    """The local model, for a container to see; of the hub's cache the whole repository, whose links lead to its blobs."""
    if request.model_path is None:
        return ()
    path = Path(model_location(request.model_path))
    repository = next((one for one in path.parents if one.name.startswith("models--") and (one / "blobs").is_dir()), path)
    return (Mount(path=str(repository)),)
