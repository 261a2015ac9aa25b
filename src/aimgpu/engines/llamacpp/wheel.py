"""The wheel `xllamacpp`: whether it runs on this CPU, and the settings of its child process. Never imports it."""

import hashlib
import importlib.metadata
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from aimgpu.engines.endpoint import write_whole
from aimgpu.engines.flags import normalise_flags
from aimgpu.engines.launch_environment import model_location
from aimgpu.engines.llamacpp.log import read_failure
from aimgpu.engines.llamacpp.purpose import find_purpose
from aimgpu.engines.models.packaged import find_packaged
from aimgpu.engines.protocols import Availability, Command, LaunchRequest
from aimgpu.errors import InvalidInput

KEY_VARIABLE = "AIMGPU_ENGINE_KEY"
SETTINGS_NAME = "llamacpp.json"
_DISTRIBUTION = "xllamacpp"
_PROBE_SECONDS = 120.0  # a loaded machine and a cold disk; a hang is unavailable too
# Flags of llama-server that the wheel takes from a footprint, and their names in it.
_INTEGER_FLAGS = {"batch-size": "n_batch", "ubatch-size": "n_ubatch", "n-gpu-layers": "n_gpu_layers"}
_OWN_FLAGS = {"ctx-size", "parallel", "threads"}
_NO_OPENMP_HINT = "Install the library (Debian and Ubuntu: apt-get install libgomp1; Fedora and RHEL: dnf install libgomp)."
_UNAVAILABLE_HINT = "Use another engine (vllm, ollama), or a machine whose CPU has AVX2."


def find_wheel(cache_directory: Path, probe_model: Path | None) -> Availability:
    """`cache_directory` remembers a probe that succeeded; `probe_model` makes the probe load it and give one token."""
    version = installed_wheel()
    if version is None:
        return Availability(available=False, reason=f"{_DISTRIBUTION} is not installed", hint="pip install 'aimgpu[embedded]'")
    proved = cache_directory / "probes" / f"{_DISTRIBUTION}-{version}-{_machine_key()}"
    wanted = "imported" if probe_model is None else "answered"
    if _remembers(proved, wanted):
        return Availability(available=True, version=version)
    failure = _run_probe(probe_model)
    if failure is not None:
        reason = f"{_DISTRIBUTION} {version} {failure}"
        hint = _NO_OPENMP_HINT if "libgomp" in failure else _UNAVAILABLE_HINT
        return Availability(available=False, version=version, reason=reason, hint=hint)
    _remember(proved, wanted)
    return Availability(available=True, version=version)


def installed_wheel() -> str | None:
    """Its version, whose last number is the build of llama.cpp in it; whether it runs here is another question."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def wheel_command(request: LaunchRequest, model_path: Path, *, remark: str | None) -> Command:
    """Also writes the settings that the child reads; `remark` is kept there for later status requests."""
    settings = request.run_directory.resolve() / SETTINGS_NAME
    write_whole(settings, {**_settings(request, model_path), "remark": remark})
    return Command(
        argv=(sys.executable, "-m", "aimgpu.engines.llamacpp.server", str(settings)),
        environment={"PYTHONUNBUFFERED": "1", **request.environment},
        device_nodes=request.device_nodes,
        secrets={KEY_VARIABLE: request.api_key},
    )


def _settings(request: LaunchRequest, model_path: Path) -> dict[str, object]:
    footprint = request.footprint
    flags = normalise_flags(footprint.flags)
    slots = _whole(flags, "parallel", footprint.concurrency)
    packaged = find_packaged(request.instance.model)
    return {
        "model_path": model_location(model_path),
        "alias": request.instance.deployment,
        "run_directory": str(request.run_directory.resolve()),
        "context_tokens": _whole(flags, "ctx-size", footprint.context_tokens * slots),
        "slots": slots,
        "purpose": find_purpose(model_path, flags),
        "threads": _whole(flags, "threads", 1),  # two instances with two threads each on two cores run at a tenth of the speed
        "parameters": {ours: _whole(flags, name, 0) for name, ours in _INTEGER_FLAGS.items() if name in flags},
        "flash_attention": flags.get("flash-attn", "auto"),
        "sampling": dict(packaged.sampling) if packaged else {},
        "adapters": [each.path for each in request.overrides.adapters],
        "cache_types": [flags.get("cache-type-k", "f16"), flags.get("cache-type-v", "f16")],
    }


def _whole(flags: Mapping[str, str], name: str, default: int) -> int:
    text = flags.get(name, str(default))
    if not text.isdecimal() or (name in _OWN_FLAGS and int(text) == 0):
        raise InvalidInput(f"--{name} {text!r} is not a whole number above 0", hint="See the flags of the footprint.")
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
    return f"failed: {read_failure(lines) or (lines[-1] if lines else 'no message')}"
