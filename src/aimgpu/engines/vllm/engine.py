"""The engine `vllm`: `vllm serve` with exactly the memory that was sized."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from aimgpu.domain import Footprint
from aimgpu.engines.endpoint import ENDPOINT_NAME, choose_port, prepare_run_directory, write_endpoint
from aimgpu.engines.flags import as_arguments, normalise_flags
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launch_environment import (
    choose_image,
    hub_environment,
    hub_folder,
    is_container,
    listen_host,
    model_location,
    model_mounts,
    network_secrets,
    sees_gpu,
)
from aimgpu.engines.launchers.log import LOG_NAME, read_last_lines
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest, Mount, PreparedImports
from aimgpu.engines.vllm import door
from aimgpu.engines.vllm.compile_cache import compile_cache
from aimgpu.engines.vllm.log import read_failure, read_load_percent, read_missing_bytes, read_stage
from aimgpu.engines.vllm.program import find_vllm, list_flags
from aimgpu.errors import EngineFailed
from aimgpu.files import cache_directory
from aimgpu.sizing.engines.vllm import CACHE_BYTES_SINCE
from aimgpu.sizing.version import at_least

_ANSWERED_NAME = "answered"  # left in the run directory by the first token
_SLEEPS_NAME = "may-sleep"  # left there by a start in sleep mode: others have no endpoint that says whether they sleep
_DEEP_NAME = "slept-deep"  # left in the run directory while its weights are nowhere in memory
_FIRST_TOKEN_SECONDS = 15.0
_WAKE_SECONDS = 120.0
_LOG_LINES = 200
_LEAST_UTILIZATION = "0.01"
IMAGES = {  # tags as the projects publish them
    "amd": "vllm/vllm-openai-rocm:latest",
    "nvidia": "vllm/vllm-openai:latest",
    "cpu": "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:latest",
}
FLAG_KEYS = {  # what users set elsewhere in the stack file
    **dict.fromkeys(("enable-lora", "lora-modules", "max-loras", "max-cpu-loras", "max-lora-rank"), "adapters"),
    "max-model-len": "context",
    "max-num-seqs": "concurrency",
    "kv-cache-memory-bytes": "gpu",
    "gpu-memory-utilization": "gpu",
    "tensor-parallel-size": "gpu: {devices: ...}",
    "dtype": "precision",
    "enable-sleep-mode": "sleep",
    "model": "model",
}
_GPU_FLAGS = ("cudagraph-capture-sizes", "cuda-graph-sizes", "gpu-memory-utilization", "compilation-config")
QUIET_FLAG, QUIET_SINCE = "disable-access-log-for-endpoints", "0.26"  # it was seen in it
_PLACED_FLAGS = (
    "model",
    "host",
    "port",
    "served-model-name",
    "api-key",
    "enable-sleep-mode",
    "tensor-parallel-size",
    "lora-modules",
)
_MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
)
_VARYING = ("HF_TOKEN", "VLLM_API_KEY", "VLLM_CACHE_ROOT")
# Its build for the CPU sets these for what it spawns (vllm/platforms/cpu.py of 0.32), which reads some of them at import.
_SPAWNED_MODULES = ("vllm.v1.worker.cpu_worker",)
_SPAWNED_VARYING = (
    "LOCAL_WORLD_SIZE",
    "NUMEXPR_MAX_THREADS",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
_SPAWNED_ENVIRONMENT = (("TORCHINDUCTOR_COMPILE_THREADS", "1"), ("TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "1"))
_SPAWNED_PRELOAD = ("torch.libs/libgomp*.so*", "torch/lib/libgomp*.so*")
_OK = 200
_SERVER_ERROR = 500


class VllmEngine:
    """With `may_sleep` it can give its memory back. Our door before it asks for the key on every path."""

    name = "vllm"
    resize_note = "vLLM takes its memory when it starts: more is used after a restart, and less only if it has not taken it"
    takes_priority = True
    fetches_models = True
    formats = frozenset({"safetensors"})
    gives_back = frozenset({"weights", "kv_cache"})  # its own memory pools; context, graphs and activations stay
    keeps_on_host = frozenset({"weights"})
    flag_keys = FLAG_KEYS

    def __init__(self, *, program: str = "vllm") -> None:
        self._program = program
        self._availability: Availability | None = None

    def availability(self) -> Availability:
        """Asked once per daemon."""
        if self._availability is None:
            self._availability = find_vllm(self._program)
        return self._availability

    @property
    def runs_without_gpu(self) -> bool:
        """Where the build of vLLM for the CPU is installed."""
        return "cpu" in (self.availability().version or "")

    @property
    def starts_alone(self) -> bool:
        """Before it took an exact KV budget (0.10.2) it measured the memory that it found free."""
        version = self.availability().version
        return version is not None and not at_least(version, CACHE_BYTES_SINCE)

    def own_flags(self, footprint: Footprint) -> Mapping[str, str]:
        """Flags of `vllm serve` that users cannot set."""
        flags = {**dict.fromkeys(_PLACED_FLAGS, "..."), **_sized_flags(footprint)}
        return {**flags, "gpu-memory-utilization": flags.get("gpu-memory-utilization", "...")}

    def known_flags(self) -> frozenset[str] | None:
        """From `vllm serve --help=all`, remembered per version."""
        found = self.availability()
        return list_flags(self._program, found.version, cache_directory()) if found.version else None

    def command(self, request: LaunchRequest) -> Command:
        """`vllm serve` with the KV cache, context and requests that were sized."""
        prepare_run_directory(request.run_directory, _ANSWERED_NAME, _DEEP_NAME, _SLEEPS_NAME)
        port = request.port or choose_port()
        write_endpoint(request.run_directory, port)
        flags = _flags(request)
        if self.runs_without_gpu and not sees_gpu(request):
            flags = _without_gpu(flags)
        if at_least(self.availability().version or "", QUIET_SINCE):
            flags[QUIET_FLAG] = "/health,/is_sleeping,/metrics"  # asked every few seconds
        if "allowed-media-domains" in (self.known_flags() or ()):  # an older vLLM is guarded by the gateway alone
            flags.setdefault(*media_flag(os.environ.get("AIMGPU_MEDIA_DOMAINS", "")))
        if request.may_sleep:
            flags["enable-sleep-mode"] = "true"
            (request.run_directory / _SLEEPS_NAME).touch()
        dev_mode = {"VLLM_SERVER_DEV_MODE": "1"} if request.may_sleep else {}
        model = model_location(request.model_path) if request.model_path else request.instance.model
        where = (
            "--host",
            listen_host(request),
            "--port",
            str(port),
            "--served-model-name",
            request.instance.deployment,
            *door.ARGUMENTS,
        )
        adapters = [json.dumps({"name": each.name, "path": each.path}) for each in request.overrides.adapters]
        modules = ("--lora-modules", *adapters) if adapters else ()
        compiled = compile_cache(request, flags)
        own = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
            "PYTHONUNBUFFERED": "1",
            "VLLM_CACHE_ROOT": str(compiled),
            "PYTHONPATH": str(door.FOLDER),
        }
        if is_container(request):
            own |= {"HF_HOME": str(hub_folder()), "HF_HUB_CACHE": str(hub_folder() / "hub")}
            compiled.mkdir(parents=True, exist_ok=True)  # Docker would make it, for root alone
        elif os.environ.get("PYTHONPATH"):
            own["PYTHONPATH"] += f":{os.environ['PYTHONPATH']}"
        return Command(
            argv=("vllm" if is_container(request) else self._program, "serve", model, *where, *as_arguments(flags), *modules),
            environment={**hub_environment(), **own, **dev_mode, **request.environment},
            image=choose_image(IMAGES, request),
            device_nodes=request.device_nodes,
            port=port,
            mounts=(
                *(model_mounts(request) or (Mount(path=str(hub_folder()), writable=True),)),
                Mount(path=str(compiled), writable=True),
                *(Mount(path=each.path) for each in request.overrides.adapters),
                Mount(path=str(door.FOLDER)),
            ),
            secrets={**network_secrets(), "VLLM_API_KEY": request.api_key},
            preparation=self._preparation() if request.prepared and not is_container(request) else None,
        )

    def _preparation(self) -> PreparedImports:
        if not self.runs_without_gpu:
            return PreparedImports(modules=_MODULES, varying=_VARYING)  # it forks its engine core
        return PreparedImports(
            modules=_MODULES + _SPAWNED_MODULES,
            varying=_VARYING + _SPAWNED_VARYING,
            environment=_SPAWNED_ENVIRONMENT,
            preload=_SPAWNED_PRELOAD,
        )

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        """Ready after the first token; while it starts, with the stage that its log shows."""
        endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
        if endpoint is None or endpoint.url is None:
            return Health(state=HealthState.STARTING)
        url = endpoint.url
        answer = ask(f"{url}/health")
        if answer is None:  # it listens only when the model is loaded
            lines = read_last_lines(run_directory / LOG_NAME, _LOG_LINES)
            percent = read_load_percent(lines)
            state = HealthState.STARTING if percent is None else HealthState.LOADING
            return Health(state=state, endpoint=url, percent=percent, stage=read_stage(lines))
        if answer.status != _OK:
            return Health(state=HealthState.BROKEN, endpoint=url, reason=f"/health answers {answer.status}")
        if (run_directory / _SLEEPS_NAME).exists() and _is_sleeping(url, api_key):
            return Health(state=HealthState.SLEEPING, endpoint=url)
        if (run_directory / _ANSWERED_NAME).exists():
            return Health(state=HealthState.READY, endpoint=url)
        return _check_first_token(run_directory, url, api_key)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        """The root cause in the log."""
        return read_failure(last_lines)

    def missing_bytes(self, last_lines: tuple[str, ...]) -> int | None:
        """What PyTorch wanted beyond the limit."""
        return read_missing_bytes(last_lines)

    def why_no_sleep(self, *, in_image: bool, simulated: bool) -> str | None:
        """Its build for the CPU refuses to start in sleep mode (seen with 0.32.0); images on a simulated GPU are that build."""
        on_cpu = simulated if in_image else self.runs_without_gpu
        return "vLLM has no sleep mode on the CPU" if on_cpu else None

    def sleep(self, run_directory: Path, api_key: str, *, deep: bool = False) -> None:
        """Weights go to host memory (level 1) or are dropped (level 2); process, context and graphs stay."""
        if deep:
            (run_directory / _DEEP_NAME).touch()  # before: the wake must know, in whichever process it happens
        _post(run_directory, f"/sleep?level={2 if deep else 1}", api_key)

    def wake(self, run_directory: Path, api_key: str) -> None:
        """Memory comes back; dropped weights are loaded again."""
        (run_directory / _ANSWERED_NAME).unlink(missing_ok=True)  # ready again means: a token came again
        deep = run_directory / _DEEP_NAME
        if not deep.exists():
            _post(run_directory, "/wake_up", api_key)
            return
        _post(run_directory, "/wake_up?tags=weights", api_key)
        _post(run_directory, "/collective_rpc", api_key, {"method": "reload_weights"})
        _post(run_directory, "/wake_up?tags=kv_cache", api_key)
        deep.unlink()


def media_flag(domains: str) -> tuple[str, str]:
    """The flag for the domains, separated by commas, that URLs in requests may name; for none a domain that no one has."""
    return "allowed-media-domains", domains.replace(",", " ").strip() or "none.invalid"


def _flags(request: LaunchRequest) -> dict[str, str]:
    """What the footprint says, and what makes it true beside other engines on one device."""
    flags = _sized_flags(request.footprint)
    devices = len({grant.device_id for grant in request.instance.grants})
    if devices > 1:
        flags.setdefault("tensor-parallel-size", str(devices))
    if flags.keys() & {"kv-cache-memory-bytes", "num-gpu-blocks-override"}:
        flags.setdefault("gpu-memory-utilization", _utilization(request))
    return flags


def _without_gpu(flags: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in flags.items() if name not in _GPU_FLAGS}


def _sized_flags(footprint: Footprint) -> dict[str, str]:
    return {
        "max-model-len": str(footprint.context_tokens),
        "max-num-seqs": str(footprint.concurrency),
        "scheduling-policy": "priority",  # so that the gateway's order holds inside the engine too
        **normalise_flags(footprint.flags),
    }


def _utilization(request: LaunchRequest) -> str:
    """The part of the GPU that must be free at its start.

    With an exact KV budget vLLM takes no more than that budget, but still refuses to start unless this part is free (0.9 by
    default), so that a second engine on a GPU would never start. What was granted is what must be free.
    """
    granted = max((grant.memory_bytes for grant in request.instance.grants), default=0)
    if not request.partition_memory_bytes or not granted:
        return _LEAST_UTILIZATION
    part = granted * 10_000 // request.partition_memory_bytes  # rounded down: never more than was granted
    return f"{max(1, min(part, 10_000)) / 10_000:.4f}"


def _check_first_token(run_directory: Path, url: str, api_key: str) -> Health:
    models = ask(f"{url}/v1/models", api_key=api_key)
    content = models.read_json() if models and models.status == _OK else None
    names = content.get("data") if content else None
    if not isinstance(names, list) or not names or not isinstance(names[0], Mapping):
        return Health(state=HealthState.BROKEN, endpoint=url, reason="/v1/models lists no model")
    question = {"model": names[0].get("id"), "prompt": "a", "max_tokens": 1}
    answer = ask(f"{url}/v1/completions", api_key=api_key, content=question, bound_seconds=_FIRST_TOKEN_SECONDS)
    if answer is None:
        return Health(state=HealthState.LOADING, endpoint=url, reason="no first token yet")
    if answer.status >= _SERVER_ERROR:
        return Health(state=HealthState.BROKEN, endpoint=url, reason=f"the first token failed with {answer.status}")
    (run_directory / _ANSWERED_NAME).touch()  # 4xx: a model that does not complete text, an embedder
    return Health(state=HealthState.READY, endpoint=url)


def _is_sleeping(url: str, api_key: str) -> bool:
    answer = ask(f"{url}/is_sleeping", api_key=api_key)
    content = answer.read_json() if answer and answer.status == _OK else None
    return bool(content and content.get("is_sleeping"))


def _post(run_directory: Path, path: str, api_key: str, content: Mapping[str, object] | None = None) -> None:
    endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
    url = endpoint.url if endpoint else None
    answer = ask(f"{url}{path}", api_key=api_key, content=content or {}, bound_seconds=_WAKE_SECONDS) if url else None
    if answer is None or answer.status != _OK:
        said = f"answered {answer.status}" if answer else "did not answer"
        raise EngineFailed(f"vLLM {said} to {path}", hint="It must be started with --enable-sleep-mode; see its log.")
