"""The container that serves a model: the engine's own image and flags. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.domain import Deployment
from aimgpu.engines.flags import as_arguments
from aimgpu.engines.ollama.engine import IMAGES as OLLAMA_IMAGES
from aimgpu.engines.vllm import door
from aimgpu.engines.vllm.engine import IMAGES as VLLM_IMAGES
from aimgpu.engines.vllm.engine import media_flag
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.models.serving.engine_keys import ENGINE_KEYS
from aimgpu.kubernetes.vocabulary.model_labels import label_value, object_name

PORT = 8000
CACHE_FOLDER = "/models"
_TEMPORARY = "/tmp"  # noqa: S108 - of the container
_OLLAMA_SCRIPT = """\
ollama serve &
server=$!
trap 'kill "$server"' TERM INT
until ollama list >/dev/null 2>&1; do
    kill -0 "$server" 2>/dev/null || exit 1
    sleep 0.2
done
{ ollama show "$1" >/dev/null 2>&1 || ollama pull "$1"; } && ollama cp "$1" "$2" && touch /tmp/loaded || exit 1
wait "$server"
"""
_PATHS = ("/", "./", "../", "~")
DOOR_MAP = "aim-gpu-vllm-door"  # the ConfigMap with the module that asks for vLLM's key on every path
_DOOR_FOLDER = "/etc/aimgpu"
_KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}  # Ollama knows no keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingImages:
    """`vendor`: of the cluster's GPUs; `own`: of this project, for the embedded engine. None: not known."""

    own: str | None
    vendor: str | None = None
    pull_policy: str | None = None
    media_domains: str = ""  # that the gateway lets URLs in requests name, by comma


def require_own_image(image: str | None) -> str:
    """Raises InvalidInput where the image of this project is not known: none is published."""
    if image is None:
        raise InvalidInput(
            "this cluster has no gateway of the chart to read the name of the project's image from",
            hint="Install the chart, or name the image with --image.",
            page_hint="Install the chart, or fill in Image.",
        )
    return image


def engine_container(deployment: Deployment, engine: str, images: ServingImages) -> dict[str, Any]:
    """Raises InvalidInput where the engine needs an image that cannot be chosen, or a file that is not in the cluster."""
    if deployment.model.startswith(_PATHS) or deployment.model.endswith(".gguf"):
        raise InvalidInput(
            f"{deployment.name}: {deployment.model} is a file of this machine, which pods do not see",
            hint="Name a model of a hub, which the pod downloads.",
        )
    makers = {"vllm": _vllm, "llamacpp": _embedded, "ollama": _ollama}
    if deployment.overrides.adapters:
        raise InvalidInput(f"{deployment.name}: 'adapters' are served on one machine", hint="Remove them for a cluster.")
    if engine not in makers:
        raise InvalidInput(
            f"{deployment.name}: engine {engine!r} runs on one machine, not on a cluster", hint=f"There: {', '.join(makers)}."
        )
    made = makers[engine](deployment, images)
    container: dict[str, Any] = {
        "name": "engine",
        "ports": [{"name": "http", "containerPort": PORT}],
        **made,
        "env": [
            *environment_of(deployment, made.get("env", {})),
            *_key_of(deployment, engine),
        ],
        "volumeMounts": [{"name": "models", "mountPath": CACHE_FOLDER}, {"name": "tmp", "mountPath": _TEMPORARY}],
    }
    if engine == "vllm":
        container["env"].append({"name": "PYTHONPATH", "value": _DOOR_FOLDER})
        container["volumeMounts"].append({"name": "door", "mountPath": _DOOR_FOLDER, "readOnly": True})
    if images.pull_policy:
        container["imagePullPolicy"] = images.pull_policy
    return container


def _key_of(deployment: Deployment, engine: str) -> list[dict[str, Any]]:
    """The variable with the engine's key; it comes last, so that the stack cannot replace it."""
    if engine not in _KEY_VARIABLES:
        return []
    key = {"name": ENGINE_KEYS, "key": label_value(deployment.name)}
    return [{"name": _KEY_VARIABLES[engine], "valueFrom": {"secretKeyRef": key}}]


def secret_name(model: str) -> str:
    """Of the Secret with the values that the stack file only refers to."""
    return f"{object_name(model)}-environment"


def _vllm(deployment: Deployment, images: ServingImages) -> dict[str, Any]:
    flags = {"scheduling-policy": "priority", "host": "0.0.0.0", "port": str(PORT)}  # noqa: S104 - the gateway is another pod
    if deployment.context_tokens is not None:
        flags["max-model-len"] = str(deployment.context_tokens)
    if deployment.concurrency is not None:
        flags["max-num-seqs"] = str(deployment.concurrency)
    if deployment.ask.device_count > 1:
        flags["tensor-parallel-size"] = str(deployment.ask.device_count)
    if deployment.precision is not None:
        flags["dtype"] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(deployment.precision, "auto")
    if deployment.overrides.image is None:  # another may be of a version that does not know it: the gateway alone guards that
        flags |= dict([media_flag(images.media_domains)])
    return {
        "image": deployment.overrides.image or _vendor_image(deployment, images),
        "command": ["vllm", "serve", deployment.model, "--served-model-name", deployment.name],
        "args": [*as_arguments(flags), *door.ARGUMENTS, *_own_arguments(deployment)],
        "env": {"VLLM_NO_USAGE_STATS": "1", "HF_HOME": CACHE_FOLDER},
        **_http_probes("/health"),
    }


def _vendor_image(deployment: Deployment, images: ServingImages) -> str:
    if images.vendor not in ("amd", "nvidia"):
        raise InvalidInput(
            f"{deployment.name}: which image of vLLM to run cannot be determined from this cluster's GPUs",
            hint="Pass --vendor amd or nvidia, or name one: `image:` in the stack file, `--image` of `aimgpu k8s deploy`.",
            page_hint="Fill in Image, with one that has vLLM for these GPUs.",
        )
    return VLLM_IMAGES[images.vendor]


def _embedded(deployment: Deployment, images: ServingImages) -> dict[str, Any]:
    """llama.cpp in this project's own image: fetches the model, then serves it."""
    words = ["--model", deployment.model, "--name", deployment.name, "--port", str(PORT), "--cache", CACHE_FOLDER]
    if deployment.context_tokens is not None:
        words += ["--context", str(deployment.context_tokens)]
    if deployment.concurrency is not None:
        words += ["--concurrency", str(deployment.concurrency)]
    if deployment.overrides.arguments:
        raise InvalidInput(f"{deployment.name}: llamacpp on a cluster takes no `args:`", hint="Remove them, or use vllm.")
    return {
        "image": deployment.overrides.image or require_own_image(images.own),
        "command": ["python", "-m", "aimgpu.kubernetes.models.serving.embedded_engine"],
        "args": words,
        **_http_probes("/health"),
    }


def _ollama(deployment: Deployment, images: ServingImages) -> dict[str, Any]:
    loaded = {"exec": {"command": ["test", "-e", "/tmp/loaded"]}}  # noqa: S108 - of the container
    environment = {"OLLAMA_HOST": f"0.0.0.0:{PORT}", "OLLAMA_MODELS": CACHE_FOLDER, "OLLAMA_KEEP_ALIVE": "-1"}
    if deployment.concurrency is not None:
        environment["OLLAMA_NUM_PARALLEL"] = str(deployment.concurrency)
    if deployment.context_tokens is not None:
        environment["OLLAMA_CONTEXT_LENGTH"] = str(deployment.context_tokens)
    return {
        "image": deployment.overrides.image or OLLAMA_IMAGES[images.vendor or "cpu"],
        "command": ["/bin/sh", "-c", _OLLAMA_SCRIPT, "ollama", deployment.model, deployment.name],
        "env": environment,
        "startupProbe": {**loaded, "periodSeconds": 5, "failureThreshold": 720},
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 5},
    }


def _http_probes(path: str) -> dict[str, Any]:
    """An hour for the start: weights are downloaded and graphs compiled in it."""
    asked = {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**asked, "periodSeconds": 2, "failureThreshold": 1800},
        "readinessProbe": {**asked, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**asked, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _own_arguments(deployment: Deployment) -> list[str]:
    """The user's flags, last."""
    return [word for flag, *values in deployment.overrides.arguments for word in (f"--{flag}", *values)]


def environment_of(deployment: Deployment, usual: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the stack file gives, in front of what is usual."""
    plain = {**usual, **dict(deployment.overrides.environment)}
    from_secret = [
        {"name": secret.name, "valueFrom": {"secretKeyRef": {"name": secret_name(deployment.name), "key": secret.name}}}
        for secret in deployment.overrides.secrets
    ]
    return [*({"name": name, "value": value} for name, value in plain.items()), *from_secret]
