"""The engine `ollama` as the control plane sees it."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from aimgpu.engines.endpoint import ENDPOINT_NAME, choose_port, prepare_run_directory, write_endpoint, write_whole
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launch_environment import choose_image, is_container, listen_host, network_secrets
from aimgpu.engines.launchers.container import OWN_FOLDER
from aimgpu.engines.ollama.container import container_argv
from aimgpu.engines.ollama.log import read_failure
from aimgpu.engines.ollama.store import store_folder
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest, Mount
from aimgpu.errors import EngineFailed, EngineUnavailable, InvalidInput
from aimgpu.files import read_bounded

_SETTINGS_NAME = "ollama.json"
_STATE_NAME = "model.json"
_VERSION = re.compile(r"version is ([\w.+-]+)")
_LOAD_SECONDS = 300.0
_UNLOAD_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_OK = 200
_LARGEST_STATE = 64 * 1024
IMAGES = {"amd": "ollama/ollama:rocm", "nvidia": "ollama/ollama:latest", "cpu": "ollama/ollama:latest"}


class OllamaEngine:
    """Ollama has no API keys: every local process can call it over loopback."""

    name = "ollama"
    resize_note = "Ollama looks at the free memory whenever it loads a model: the next load uses it"
    runs_without_gpu = False  # it would, but llama.cpp is at hand and lighter
    takes_priority = False
    starts_alone = False
    fetches_models = True
    formats: frozenset[str] = frozenset()  # it serves from its own store
    # Its runner, which held everything on the GPU, ends; the server alone holds nothing there.
    gives_back = frozenset({"weights", "kv_cache", "activations", "graphs", "engine", "context", "startup"})
    keeps_on_host: frozenset[str] = frozenset()

    def __init__(self, *, program: str = "ollama") -> None:
        self._program = program
        self._availability: Availability | None = None

    def availability(self) -> Availability:
        """Asked once; the program is run for its version."""
        if self._availability is None:
            self._availability = _find(self._program)
        return self._availability

    def command(self, request: LaunchRequest) -> Command:
        """A small program of ours that starts the server, brings the model and gives it its served name."""
        model = request.instance.model
        if model.endswith(".gguf") or model.startswith(("/", "./", "~")):
            raise InvalidInput(f"ollama takes a tag, not the file {model}", hint="Use the engine llamacpp for a .gguf file.")
        program = self._program if is_container(request) else shutil.which(self._program)
        if program is None:
            raise EngineUnavailable(f"the program {self._program!r} is not on PATH", hint="Install Ollama from ollama.com.")
        folder = request.run_directory.resolve()
        prepare_run_directory(folder, _STATE_NAME, f"{OWN_FOLDER}/{_STATE_NAME}")
        port = request.port or choose_port()
        settings = {
            "program": program,
            "url": write_endpoint(folder, port),
            "model": model,
            "alias": request.instance.deployment,
            "run_directory": str(folder),
        }
        write_whole(folder / _SETTINGS_NAME, settings)
        argv: tuple[str, ...] = (sys.executable, "-m", "aimgpu.engines.ollama.start", str(folder / _SETTINGS_NAME))
        if is_container(request):
            argv = container_argv(model, request.instance.deployment, str(folder / OWN_FOLDER / _STATE_NAME))
        return Command(
            argv=argv,
            environment={**_variables(request, port), **request.environment},
            image=choose_image(IMAGES, request),
            device_nodes=request.device_nodes,
            port=port,
            mounts=(Mount(path=str(store_folder()), writable=True),),
            secrets=network_secrets(),
        )

    def check_health(self, run_directory: Path, api_key: str) -> Health:  # noqa: ARG002 - Ollama knows no keys
        """Ready while its own model is loaded, by the server's list."""
        endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
        url = endpoint.url if endpoint else None
        answer = ask(f"{url}/api/ps") if url else None
        if answer is None:
            return Health(state=HealthState.STARTING, endpoint=url)
        if answer.status != _OK:
            return Health(state=HealthState.BROKEN, endpoint=url, reason=f"/api/ps answers {answer.status}")
        model = _read_state(run_directory)
        if model.get("state") == "broken":
            return Health(state=HealthState.BROKEN, endpoint=url, reason=str(model.get("reason")))
        if model.get("state") != "loaded":
            percent = model.get("percent")
            return Health(state=HealthState.LOADING, endpoint=url, percent=percent if isinstance(percent, int) else None)
        loaded = (answer.read_json() or {}).get("models")
        mine = isinstance(loaded, list) and any(_is_own(one, run_directory, model.get("digest")) for one in loaded)
        return Health(state=HealthState.READY if mine else HealthState.SLEEPING, endpoint=url)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        """The root cause in the log."""
        return read_failure(last_lines)

    def why_no_sleep(self, *, in_image: bool, simulated: bool) -> str | None:  # noqa: ARG002 - it unloads models anywhere
        """Nothing prevents it."""
        return None

    def sleep(self, run_directory: Path, api_key: str, *, deep: bool = False) -> None:  # noqa: ARG002 - knows neither
        """The model leaves memory, the server stays. It answers before the memory is free; then it is no longer listed."""
        _generate(run_directory, {"keep_alive": 0}, "unload")
        deadline = time.monotonic() + _UNLOAD_SECONDS
        while self.check_health(run_directory, api_key).state is not HealthState.SLEEPING:
            if time.monotonic() > deadline:
                raise EngineFailed(f"Ollama still holds its model after {_UNLOAD_SECONDS:.0f} s", hint="See its log.")
            time.sleep(_LOOK_SECONDS)

    def wake(self, run_directory: Path, api_key: str) -> None:  # noqa: ARG002 - Ollama knows no keys
        """Load the model again, with one token."""
        _generate(run_directory, {"keep_alive": -1, "prompt": "a", "options": {"num_predict": 1}}, "load")


def _variables(request: LaunchRequest, port: int) -> dict[str, str]:
    footprint = request.footprint
    return {
        "OLLAMA_CONTEXT_LENGTH": str(
            footprint.context_tokens
        ),  # of each request; Ollama multiplies by parallel requests itself
        "OLLAMA_NUM_PARALLEL": str(footprint.concurrency),
        **{name: value for name, value in footprint.flags.items() if name.startswith("OLLAMA_")},
        "OLLAMA_HOST": f"{listen_host(request)}:{port}",
        "OLLAMA_MODELS": str(store_folder()),
        "OLLAMA_KEEP_ALIVE": "-1",  # we decide when it goes
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_NOPRUNE": "1",  # servers share one store: none may clean up what another downloads
    }


def _generate(run_directory: Path, options: Mapping[str, object], what: str) -> None:
    endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
    settings = json.loads((run_directory / _SETTINGS_NAME).read_bytes())
    content = {"model": settings["alias"], "stream": False, **options}
    url = endpoint.url if endpoint else None
    answer = ask(f"{url}/api/generate", content=content, bound_seconds=_LOAD_SECONDS) if url else None
    if answer is None or answer.status != _OK:
        said = f"answered {answer.status}" if answer else "did not answer"
        raise EngineFailed(f"Ollama {said} when asked to {what} {settings['alias']}", hint="See its log.")


def _is_own(entry: object, run_directory: Path, digest: object) -> bool:
    """Whether a model that the server lists as loaded is the instance's: another caller may have had another one loaded.

    One model may have several names. It is listed by the name that loaded it, so its digest counts where it is known.
    """
    if not isinstance(entry, Mapping):
        return False
    if digest is not None and entry.get("digest") == digest:
        return True
    try:
        settings = json.loads((run_directory / _SETTINGS_NAME).read_bytes())
        own = {_whole_name(str(settings[key])) for key in ("alias", "model")}
    except (OSError, ValueError, KeyError, TypeError):
        return True  # its names are lost: what is loaded is taken for its own
    return _whole_name(str(entry.get("name"))) in own


def _whole_name(name: str) -> str:
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def _read_state(run_directory: Path) -> Mapping[str, object]:
    found = run_directory / OWN_FOLDER / _STATE_NAME  # of a container, which may write anything there
    path = found if found.is_file() and not found.is_symlink() else run_directory / _STATE_NAME
    try:
        content = json.loads(read_bounded(path, _LARGEST_STATE))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _find(program: str) -> Availability:
    path = shutil.which(program)
    if path is None:
        return Availability(
            available=False, reason=f"the program {program!r} is not on PATH", hint="Install Ollama from ollama.com."
        )
    try:
        result = subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - the engine itself
    except (OSError, subprocess.TimeoutExpired) as error:
        return Availability(available=False, reason=f"{path} does not run: {error}", hint=f"Try: {path} --version")
    match = _VERSION.search(result.stdout.decode("utf-8", "replace") + result.stderr.decode("utf-8", "replace"))
    if match is None:
        return Availability(available=False, reason=f"{path} does not report its version", hint=f"Try: {path} --version")
    return Availability(available=True, version=match[1])
