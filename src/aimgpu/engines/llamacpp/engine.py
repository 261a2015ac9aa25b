"""The Engine `llamacpp` as the control plane sees it: never imports the wheel."""

import hashlib
import importlib.metadata
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from aimgpu.engines.causes import find_cause
from aimgpu.engines.endpoint import ENDPOINT_NAME, prepare_run_directory, write_whole
from aimgpu.engines.flags import normalise_flags
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.llamacpp.container import container_command
from aimgpu.engines.models.packaged import find_packaged
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest
from aimgpu.engines.surroundings import is_container
from aimgpu.errors import InvalidInput

KEY_VARIABLE = "AIMGPU_ENGINE_KEY"
_SETTINGS_NAME = "llamacpp.json"
_DISTRIBUTION = "xllamacpp"
_PROBE_SECONDS = 120.0  # a loaded machine and a cold disk; a hang is unavailable too
# Flags of llama-server that this engine takes from a Footprint, and their names in the wheel.
_INTEGER_FLAGS = {"batch-size": "n_batch", "ubatch-size": "n_ubatch", "n-gpu-layers": "n_gpu_layers"}
_OWN_FLAGS = {"ctx-size", "parallel", "threads"}
_UNAVAILABLE_HINT = "Use another engine (vllm, ollama), or a machine whose CPU has AVX2."


class LlamaCppEngine:
    """`cache_directory` remembers a probe that succeeded; `probe_model` makes the probe load it and give one token."""

    name = "llamacpp"
    runs_without_gpu = True
    takes_priority = False
    starts_alone = False
    fetches_models = False
    formats = frozenset({"gguf"})

    def __init__(self, *, cache_directory: Path, probe_model: Path | None = None) -> None:
        self._cache_directory = cache_directory
        self._probe_model = probe_model
        self._availability: Availability | None = None

    def availability(self) -> Availability:
        if self._availability is None:
            self._availability = self._find_availability()
        return self._availability

    def command(self, request: LaunchRequest) -> Command:
        """Also writes the settings that the child reads, and removes the endpoint of a run before."""
        if request.model_path is None:
            raise InvalidInput(
                f"llamacpp needs a GGUF file for {request.instance.model!r}", hint="Give the path of a .gguf file as the model."
            )
        prepare_run_directory(request.run_directory)
        if is_container(request):
            return container_command(request, request.model_path)
        settings = request.run_directory.resolve() / _SETTINGS_NAME
        write_whole(settings, _settings(request, request.model_path))
        return Command(
            argv=(sys.executable, "-m", "aimgpu.engines.llamacpp.server", str(settings)),
            environment={"PYTHONUNBUFFERED": "1", **request.environment},
            device_nodes=request.device_nodes,
            secrets={KEY_VARIABLE: request.api_key},
        )

    def check_health(self, run_directory: Path, api_key: str) -> Health:  # noqa: ARG002 - /health needs no key
        endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
        if endpoint is None:
            return Health(state=HealthState.STARTING)
        if endpoint.url is None:
            return Health(state=HealthState.LOADING)
        answer = ask(f"{endpoint.url}/health")
        if answer is None:
            return Health(state=HealthState.STARTING, endpoint=endpoint.url, reason="no answer")
        if answer.status == 200:  # noqa: PLR2004
            return Health(state=HealthState.READY, endpoint=endpoint.url)
        if answer.status == 503:  # noqa: PLR2004
            return Health(state=HealthState.LOADING, endpoint=endpoint.url)
        return Health(state=HealthState.BROKEN, endpoint=endpoint.url, reason=f"/health answers {answer.status}")

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        return _read_failure(last_lines)

    def _find_availability(self) -> Availability:
        version = installed_llamacpp()
        if version is None:
            return Availability(
                available=False, reason=f"{_DISTRIBUTION} is not installed", hint=f"pip install {_DISTRIBUTION}"
            )
        proved = self._cache_directory / "probes" / f"{_DISTRIBUTION}-{version}-{_machine_key()}"
        wanted = "imported" if self._probe_model is None else "answered"
        if _remembers(proved, wanted):
            return Availability(available=True, version=version)
        failure = _run_probe(self._probe_model)
        if failure is not None:
            return Availability(
                available=False, version=version, reason=f"{_DISTRIBUTION} {version} {failure}", hint=_UNAVAILABLE_HINT
            )
        _remember(proved, wanted)
        return Availability(available=True, version=version)


def installed_llamacpp() -> str | None:
    """The version of the wheel, whose last number is the build of llama.cpp in it; whether it runs here is another question."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _settings(request: LaunchRequest, model_path: Path) -> dict[str, object]:
    footprint = request.footprint
    flags = normalise_flags(footprint.flags)
    slots = _whole(flags, "parallel", footprint.concurrency)
    packaged = find_packaged(request.instance.model)
    return {
        "model_path": str(model_path.resolve()),
        "alias": request.instance.deployment,
        "run_directory": str(request.run_directory.resolve()),
        "context_tokens": _whole(flags, "ctx-size", footprint.context_tokens * slots),
        "slots": slots,
        "threads": _whole(flags, "threads", 1),  # two instances with two threads each on two cores run at a tenth of the speed
        "parameters": {ours: _whole(flags, name, 0) for name, ours in _INTEGER_FLAGS.items() if name in flags},
        "flash_attention": flags.get("flash-attn", "auto"),
        "sampling": dict(packaged.sampling) if packaged else {},
        "cache_types": [flags.get("cache-type-k", "f16"), flags.get("cache-type-v", "f16")],
    }


def _whole(flags: Mapping[str, str], name: str, default: int) -> int:
    text = flags.get(name, str(default))
    if not text.isdecimal() or (name in _OWN_FLAGS and int(text) == 0):
        raise InvalidInput(f"--{name} {text!r} is not a whole number above 0", hint="See the flags of the Footprint.")
    return int(text)


def _machine_key() -> str:
    """A probe holds for one kind of CPU and one Python: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{flags}|{sys.version}|{sys.executable}".encode()).hexdigest()[:16]


def _remembers(proved: Path, wanted: str) -> bool:
    try:
        return proved.read_text(encoding="utf-8").strip() in {wanted, "answered"}
    except OSError:
        return False


def _remember(proved: Path, what: str) -> None:
    try:
        proved.parent.mkdir(parents=True, exist_ok=True)
        part = proved.with_suffix(".part")
        part.write_text(what + "\n", encoding="utf-8")
        part.replace(proved)
    except OSError:
        return  # a cache that cannot be written costs the next start one more probe


def _run_probe(model: Path | None) -> str | None:
    """What went wrong, as the end of a sentence; None: nothing did."""
    command = [sys.executable, "-m", "aimgpu.engines.llamacpp.probe", *([str(model)] if model else [])]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - our own module
    except subprocess.TimeoutExpired:
        return f"did not answer within {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        return f"could not be tried: {error.strerror}"
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        number = signal.Signals(-result.returncode)
        why = " (this CPU lacks instructions that it was built for)" if number is signal.SIGILL else ""
        return f"died of {number.name}{why}"
    lines = tuple(result.stderr.decode("utf-8", "replace").splitlines())
    return f"failed: {_read_failure(lines) or (lines[-1] if lines else 'no message')}"


def _read_failure(lines: tuple[str, ...]) -> str | None:
    """Lines of llama.cpp that tell an error look like "0.00.004.067 E gguf_init_from_file: ...": the first is the cause."""
    errors = [line.split(" E ", 1)[1].strip() for line in lines if " E " in line]
    if cause := find_cause(errors, _CAUSES):
        return cause
    if errors:
        return errors[0]
    python = [line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError", "OSError", "MemoryError"))]
    return python[-1] if python else None


_CAUSES = {
    "the model file cannot be opened: {0}": r"failed to open GGUF file (.*)",
    "the model file is not GGUF": r"invalid magic characters",
    "the model file is cut off or damaged": (
        r"failed to read key-value pairs|failed to read tensor|data is not within the file bounds|tensor .* out of bounds"
    ),
    "this llama.cpp does not know the model's architecture {0}": r"unknown model architecture: (.*)",
    "not enough memory: {0}": r"((?:failed|unable) to allocate.*)",
    "no port could be had": r"couldn't bind",
}
