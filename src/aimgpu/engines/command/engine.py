"""The engine `command`: whatever a stack file names, with the port that it is given."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from aimgpu.domain import Deployment, ServerProgram
from aimgpu.engines.command.presets import find_preset
from aimgpu.engines.endpoint import ENDPOINT_NAME, choose_port, prepare_run_directory, write_endpoint, write_whole
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launch_environment import (
    hub_environment,
    is_container,
    listen_host,
    model_location,
    model_mounts,
    network_secrets,
)
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest, Mount
from aimgpu.errors import EngineUnavailable, InvalidInput

KEY_VARIABLE = "AIMGPU_ENGINE_KEY"
_SERVER_NAME, _MODELS_NAME = "server.json", "models.json"
_OK, _REDIRECTED, _SERVER_ERROR = 200, 300, 500
_MOST_MODELS = 100
_SIZED_PERCENT = 85  # of a grant, for weights and KV cache: the rest is for activations, graphs and the driver's context


class CommandEngine:
    """Nothing is known of the program but its command: what it takes is what it was granted."""

    name = "command"
    takes_priority = False
    starts_alone = False
    runs_without_gpu = True
    fetches_models = True
    formats: frozenset[str] = frozenset()

    def availability(self) -> Availability:
        """Never chosen by itself."""
        return Availability(available=False, reason="it serves only models whose entry names it, with a `command`")

    def check(self, deployment: Deployment, *, installed: bool) -> None:
        """Raises EngineUnavailable or InvalidInput for what could not be started. `installed`: on this machine, in no image."""
        server = _server_of(deployment.overrides.server, deployment.name)
        if not installed and deployment.overrides.image is None:
            raise InvalidInput(f"{deployment.name}: a container of a command needs an `image`", hint="Name the image to run.")
        if not installed:
            return
        if server.directory is not None and not Path(server.directory).is_dir():
            raise InvalidInput(f"{deployment.name}: there is no folder {server.directory}", hint="Correct `directory`.")
        if _find_program(server, dict(deployment.overrides.environment)) is None:
            preset = find_preset(server.argv[0])
            raise EngineUnavailable(
                f"{deployment.name}: {server.argv[0]!r} is not a program on this machine",
                hint=f"Install it: {preset.install}. Or name its folder in `env: {{PATH: ...}}`."
                if preset
                else "Install it, or write its whole path; a relative one counts from `directory`.",
            )

    def command(self, request: LaunchRequest) -> Command:
        """The user's, in its folder. The key is in the environment too, where other users cannot read it."""
        server = _server_of(request.overrides.server, request.instance.deployment)
        prepare_run_directory(request.run_directory, _SERVER_NAME, _MODELS_NAME)
        port = request.port or choose_port()
        write_endpoint(request.run_directory, port)
        settings = {"health": server.health, "models": server.models, "ready_seconds": server.ready_seconds}
        write_whole(request.run_directory / _SERVER_NAME, settings)
        model = model_location(request.model_path) if request.model_path else request.instance.model
        given = {"{port}": str(port), "{host}": listen_host(request), "{model}": model, "{key}": request.api_key}
        given["{memory_fraction}"] = _memory_fraction(request)
        preset = find_preset(server.argv[0])
        variables = {KEY_VARIABLE, *([preset.key_variable] if preset and preset.key_variable else [])}
        argv = tuple(_filled(word, given) for word in server.argv)
        if server.directory is not None and not is_container(request):
            program = _find_program(server, dict(request.overrides.environment)) or argv[0]
            argv = ("env", "-C", server.directory, program, *argv[1:])
        return Command(
            argv=argv,
            environment={**hub_environment(), "PYTHONUNBUFFERED": "1", **request.environment},
            image=request.overrides.image,
            device_nodes=request.device_nodes,
            port=port,
            mounts=(*model_mounts(request), *([Mount(path=server.directory)] if server.directory else [])),
            secrets={**network_secrets(), **dict.fromkeys(variables, request.api_key)},
        )

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        """Ready when its health path answers 2xx. Then it is asked once how it calls its models, unless that was given."""
        endpoint = read_endpoint(run_directory / ENDPOINT_NAME)
        if endpoint is None or endpoint.url is None:
            return Health(state=HealthState.STARTING)
        url, settings = endpoint.url, _read_json(run_directory / _SERVER_NAME)
        path = str(settings.get("health", ServerProgram.HEALTH))
        answer = ask(f"{url}{path}", api_key=api_key)
        if answer is None:
            return Health(state=HealthState.STARTING, endpoint=url, reason="no answer")
        if answer.status >= _SERVER_ERROR:
            return Health(state=HealthState.LOADING, endpoint=url, reason=f"{path} answers {answer.status}")
        if not _OK <= answer.status < _REDIRECTED:
            reason = f"{path} answers {answer.status}; `health` names the path that answers 200 when it is ready"
            return Health(state=HealthState.BROKEN, endpoint=url, reason=reason)
        if not settings.get("models") and not (run_directory / _MODELS_NAME).exists():
            names = _ask_models(url, api_key)
            if names is None:  # too busy for now: without its names every request would ask for the wrong one
                return Health(state=HealthState.LOADING, endpoint=url, reason="no answer at /v1/models")
            write_whole(run_directory / _MODELS_NAME, {"models": names})
        return Health(state=HealthState.READY, endpoint=url)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        """The last line that it wrote: nothing more is known of it."""
        return next((line.strip() for line in reversed(last_lines) if line.strip()), None)

    def served_models(self, run_directory: Path) -> tuple[str, ...]:
        """As the server calls them, the first before the others; empty: it did not say."""
        given = _read_json(run_directory / _SERVER_NAME).get("models") or _read_json(run_directory / _MODELS_NAME).get("models")
        return tuple(map(str, given)) if isinstance(given, list) else ()

    def ready_seconds(self, run_directory: Path) -> float | None:
        """How long it may load; None: as long as any."""
        given = _read_json(run_directory / _SERVER_NAME).get("ready_seconds")
        return given if isinstance(given, int) else None


def _server_of(server: ServerProgram | None, name: str) -> ServerProgram:
    if server is None:
        raise InvalidInput(f"{name}: the engine 'command' needs a `command`", hint="Write it into a stack file.")
    return server


def _filled(word: str, given: Mapping[str, str]) -> str:
    for placeholder, value in given.items():
        word = word.replace(placeholder, value)
    return word


def _memory_fraction(request: LaunchRequest) -> str:
    """What a server may plan with, as a part of the memory that it sees: with the interposer its grant, else the partition."""
    granted = max((grant.memory_bytes for grant in request.instance.grants), default=0)
    seen = granted if "AIMGPU_REGION" in request.environment else request.partition_memory_bytes or granted
    thousandths = granted * _SIZED_PERCENT * 10 // seen if seen else 0  # rounded down: never more than was granted
    return f"{max(1, min(thousandths, _SIZED_PERCENT * 10)) / 1000:.3f}"


def _find_program(server: ServerProgram, environment: Mapping[str, str]) -> str | None:
    program = server.argv[0]
    if "/" in program and server.directory is not None:
        program = str(Path(server.directory) / Path(program).expanduser())
    return shutil.which(program, path=environment.get("PATH"))


def _ask_models(url: str, api_key: str) -> list[str] | None:
    """Empty where it has no such list; None: it did not answer."""
    answer = ask(f"{url}/v1/models", api_key=api_key)
    if answer is None:
        return None
    listed = (answer.read_json() or {}).get("data") if answer.status == _OK else None
    names = [one.get("id") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [name for name in names if isinstance(name, str) and name][:_MOST_MODELS]


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
