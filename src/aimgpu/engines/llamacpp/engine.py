"""The engine `llamacpp` as the control plane sees it: `llama-server` on a GPU, the wheel on the CPU."""

import json
from collections.abc import Mapping
from pathlib import Path

from aimgpu.domain import Footprint
from aimgpu.engines.endpoint import ENDPOINT_NAME, prepare_run_directory
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launch_environment import is_container, sees_gpu
from aimgpu.engines.launchers.log import LOG_NAME, read_last_lines
from aimgpu.engines.llamacpp.arguments import FLAG_KEYS, own_flags
from aimgpu.engines.llamacpp.container import container_command
from aimgpu.engines.llamacpp.log import read_failure, read_load_percent, read_missing_bytes, tells_no_gpu
from aimgpu.engines.llamacpp.program import (
    NAME,
    VARIABLE,
    NoProgram,
    Program,
    find_program,
    installed_program,
    list_flags,
    program_command,
)
from aimgpu.engines.llamacpp.purpose import FLAGS
from aimgpu.engines.llamacpp.wheel import SETTINGS_NAME, find_wheel, installed_wheel, wheel_command
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest
from aimgpu.errors import EngineUnavailable, InvalidInput

_ANSWERED_NAME = "answered"  # left in the run directory by the first token
_GPU_NAME = "on-gpu"  # left there at the start of one that must not compute on the CPU
_FIRST_TOKEN_SECONDS = 15.0
_FIRST_PROMPT = "a " * 64  # long enough for cuBLAS, which takes its memory when it is first used: one token goes another way
_LOG_LINES = 500
_OK = 200
_SERVER_ERROR = 500
_NOT_OFFERED = 501  # an embedder completes no text
_LOADING = 503
_GPU_HINT = f"Put a {NAME} that was built for this GPU on PATH, or name it in {VARIABLE}."


class LlamaCppEngine:
    """`has_gpu`: this machine has a real device, so that a `llama-server` is looked for.

    `cache_directory` remembers a probe of the wheel that succeeded; `probe_model` makes the probe load it and give one token.
    """

    name = "llamacpp"
    resize_note = "llama.cpp takes its memory when it loads the model: more is used after a restart"
    runs_without_gpu = True
    takes_priority = False
    starts_alone = False
    fetches_models = False
    formats = frozenset({"gguf"})
    flag_keys = FLAG_KEYS

    def __init__(self, *, cache_directory: Path, probe_model: Path | None = None, has_gpu: bool = False) -> None:
        self._cache_directory = cache_directory
        self._probe_model = probe_model
        self._has_gpu = has_gpu
        self._program: Program | NoProgram | None = None
        self._availability: Availability | None = None

    def availability(self) -> Availability:
        """Where it is available and there is a `reason`, it runs on the CPU although there is a GPU."""
        if self._availability is None:
            self._availability = self._find_availability()
        return self._availability

    def command(self, request: LaunchRequest) -> Command:
        """Also writes what the child reads, and removes what a run before said of itself."""
        if request.model_path is None:
            raise InvalidInput(
                f"llamacpp needs a GGUF file for {request.instance.model!r}", hint="Give the path of a .gguf file as the model."
            )
        prepare_run_directory(request.run_directory, _ANSWERED_NAME, _GPU_NAME, SETTINGS_NAME)
        if is_container(request):
            _mark_gpu(request)
            return container_command(request, request.model_path)
        if not sees_gpu(request):
            return wheel_command(request, request.model_path, remark=None)
        program = self._find_program()
        if isinstance(program, Program):
            _mark_gpu(request)
            return program_command(program, request)
        if program.named:
            raise EngineUnavailable(f"llamacpp cannot run here: {program.reason}", hint=_GPU_HINT)
        return wheel_command(request, request.model_path, remark=_on_cpu(program))

    def remark(self, run_directory: Path) -> str | None:
        """What its owner should know of an instance that serves."""
        try:
            remark = json.loads((run_directory / SETTINGS_NAME).read_bytes()).get("remark")
        except (OSError, ValueError, AttributeError):
            return None
        return str(remark) if remark else None

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        """Ready after the first token, computed where it should be."""
        endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
        if endpoint is None or endpoint.url is None:
            return Health(state=HealthState.STARTING if endpoint is None else HealthState.LOADING)
        answer = ask(f"{endpoint.url}/health")
        if answer is None:
            return Health(state=HealthState.STARTING, endpoint=endpoint.url, reason="no answer")
        if answer.status == _LOADING:
            percent = read_load_percent(read_last_lines(run_directory / LOG_NAME, _LOG_LINES))
            return Health(state=HealthState.LOADING, endpoint=endpoint.url, percent=percent)
        if answer.status != _OK:
            return Health(state=HealthState.BROKEN, endpoint=endpoint.url, reason=f"/health answers {answer.status}")
        if (run_directory / SETTINGS_NAME).exists() or (run_directory / _ANSWERED_NAME).exists():
            return Health(
                state=HealthState.READY, endpoint=endpoint.url
            )  # the wheel's child computed a token before it said so
        return _check_first_token(run_directory, endpoint.url, api_key)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        """The root cause in the log."""
        return read_failure(last_lines)

    def missing_bytes(self, last_lines: tuple[str, ...]) -> int | None:
        """The buffer that the GPU refused."""
        return read_missing_bytes(last_lines)

    def own_flags(self, footprint: Footprint) -> Mapping[str, str]:
        """Flags of `llama-server` that users cannot set."""
        return own_flags(footprint)

    def known_flags(self) -> frozenset[str] | None:
        """Those of `llama-server`; the wheel on the CPU takes what sets a model's purpose."""
        program = self._find_program() if self._has_gpu else None
        return list_flags(program.path) if isinstance(program, Program) else frozenset(FLAGS)

    def _find_program(self) -> Program | NoProgram:
        if self._program is None:
            self._program = find_program()
        return self._program

    def _find_availability(self) -> Availability:
        if not self._has_gpu:
            return find_wheel(self._cache_directory, self._probe_model)
        program = self._find_program()
        if isinstance(program, Program):
            return Availability(available=True, version=program.version, where=program.path)
        if program.named:
            return Availability(available=False, reason=program.reason, hint=_GPU_HINT)
        wheel = find_wheel(self._cache_directory, self._probe_model)
        if not wheel.available:
            return Availability(available=False, reason=f"{program.reason}, and {wheel.reason}", hint=_GPU_HINT)
        return Availability(available=True, version=wheel.version, reason=_on_cpu(program), hint=_GPU_HINT)


def installed_llamacpp(*, has_gpu: bool = False) -> str | None:
    """The version that would be used; whether it runs here is another question."""
    return (installed_program() if has_gpu else None) or installed_wheel()


def _on_cpu(program: NoProgram) -> str:
    return f"runs on the CPU: {program.reason}"


def _mark_gpu(request: LaunchRequest) -> None:
    if sees_gpu(request):
        (request.run_directory / _GPU_NAME).touch()


def _check_first_token(run_directory: Path, url: str, api_key: str) -> Health:
    """A model that loads but cannot compute, or computes elsewhere than on its GPU, must not be called ready."""
    if (run_directory / _GPU_NAME).exists() and tells_no_gpu(read_last_lines(run_directory / LOG_NAME, _LOG_LINES)):
        return Health(state=HealthState.BROKEN, endpoint=url, reason=f"{NAME} sees no GPU and would run on the CPU")
    question = {"prompt": _FIRST_PROMPT, "max_tokens": 1, "cache_prompt": False}
    answer = ask(f"{url}/v1/completions", api_key=api_key, content=question, bound_seconds=_FIRST_TOKEN_SECONDS)
    if answer is None:
        return Health(state=HealthState.LOADING, endpoint=url, reason="no first token yet")
    if answer.status >= _SERVER_ERROR and answer.status != _NOT_OFFERED:
        return Health(state=HealthState.BROKEN, endpoint=url, reason=f"the first token failed with {answer.status}")
    (run_directory / _ANSWERED_NAME).touch()
    return Health(state=HealthState.READY, endpoint=url)
