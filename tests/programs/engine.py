"""`fake_engine.py` as an Engine, for tests of whatever drives engines."""

import sys
from collections.abc import Mapping
from pathlib import Path

from aimgpu.engines.endpoint import choose_port, write_endpoint
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launch_environment import is_container, listen_host
from aimgpu.engines.launchers.container import OWN_FOLDER
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest, Mount

PROGRAM = Path(__file__).with_name("fake_engine.py")


class ScriptedEngine:
    """Starts fake_engine.py with `flags`, or with `by_deployment[name]` where a deployment has its own."""

    runs_without_gpu = True
    takes_priority = False
    starts_alone = False
    fetches_models = True
    formats = frozenset({"gguf", "safetensors"})

    def __init__(  # noqa: PLR0913 - a script has many lines
        self,
        name: str = "scripted",
        *,
        flags: tuple[str, ...] = (),
        by_deployment: Mapping[str, tuple[str, ...]] | None = None,
        available: bool = True,
        image: str | None = None,
        mounts: tuple[Mount, ...] = (),
    ) -> None:
        self.name = name
        self.flags = flags
        self.by_deployment = dict(by_deployment or {})
        self.available = available
        self.image = image
        self.mounts = mounts

    def availability(self) -> Availability:
        if self.available:
            return Availability(available=True, version="1")
        return Availability(available=False, reason="the test says so", hint="Use another engine.")

    def command(self, request: LaunchRequest) -> Command:
        request.run_directory.mkdir(parents=True, exist_ok=True)
        (request.run_directory / "endpoint.json").unlink(missing_ok=True)
        flags = self.by_deployment.get(request.instance.deployment, self.flags)
        folder, port = request.run_directory.absolute(), None
        if is_container(request):
            port, folder = choose_port(), folder / OWN_FOLDER
            write_endpoint(request.run_directory, port)
            flags = ("--host", listen_host(request), "--port", str(port), *flags)
        return Command(
            argv=(sys.executable, str(PROGRAM), str(folder), *flags),
            environment=dict(request.environment),
            port=port,
            device_nodes=request.device_nodes,
            image=self.image,
            mounts=self.mounts,
            secrets={"AIMGPU_ENGINE_KEY": request.api_key},
        )

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        endpoint = read_endpoint(run_directory / "endpoint.json")
        if endpoint is None or endpoint.url is None:
            return Health(state=HealthState.STARTING)
        answer = ask(f"{endpoint.url}/health", api_key=api_key, bound_seconds=2.0)
        if answer is None:
            return Health(state=HealthState.STARTING, endpoint=endpoint.url, reason="no answer")
        states = {200: HealthState.READY, 503: HealthState.LOADING}
        return Health(state=states.get(answer.status, HealthState.BROKEN), endpoint=endpoint.url)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        return next((line for line in reversed(last_lines) if "error" in line.lower()), None)
