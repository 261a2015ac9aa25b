"""One daemon with three small models for all clients, and the clients' own environments, made once from their lock files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.cluster.cache import cached
from tests.cluster.go_programs import go
from tests.downloads import one_line
from tests.node_packages import install_packages

from aimgpu.files import locked

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
OLLAMA_VERSION = "0.33.0"
STACK = """
models:
  chat: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 4096, concurrency: 2}
  other: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 1024}
"""
Failures = Mapping[str, str | None]  # by call: what went wrong


@dataclass(frozen=True)
class Gateway:
    url: str
    environment: dict[str, str]

    def aimgpu(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aimgpu.cli.main", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environment, input=text, timeout=600
        )

    def deploy(self, *arguments: str) -> None:
        """`aimgpu up`; where a model does not start, the test shows its reason, its log and that of the daemon."""
        done = self.aimgpu("up", *arguments)
        if done.returncode:
            home = Path(self.environment["AIMGPU_HOME"])
            logs = (f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(home.rglob("*.log")))
            pytest.fail("\n".join((f"up ended with {done.returncode}", done.stdout, done.stderr, *logs)))


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("clients")
    stack = folder / "stack.yaml"
    stack.write_text(STACK)
    environment = os.environ | {"AIMGPU_HOME": str(folder / "home"), "AIMGPU_PORT": "0"}
    starting = Gateway("", environment)
    starting.deploy("--file", str(stack), "--detach")
    try:
        status = json.loads(starting.aimgpu("ps", "--json").stdout)
        yield Gateway(status["models_url"].removesuffix("/v1"), environment)
    finally:
        starting.aimgpu("down")


@dataclass
class Programs:
    """Runs each client's program once; its calls are asked for one by one."""

    gateway: Gateway
    results: dict[str, Failures] = field(default_factory=dict)

    def failure(self, program: str, call: str, command: Callable[[], list[str]]) -> str | None:
        """What went wrong in one call; None: nothing."""
        if program not in self.results:
            self.results[program] = self._run(command())
        return self.results[program][call]

    def _run(self, command: list[str]) -> Failures:
        environment = os.environ | {"AIMGPU_CLIENTS_URL": self.gateway.url, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
        assert lines, done.stderr[-4000:]
        return {line["call"]: line["error"] for line in lines}


@pytest.fixture(scope="session")
def programs(gateway: Gateway) -> Programs:
    return Programs(gateway)


def python_environment(group: str) -> Path:
    """The interpreter of one group of clients."""
    folder = BUILD / group
    command = [
        str(ROOT / "tools" / "uv.sh"),
        "sync",
        "--frozen",
        "--quiet",
        "--project",
        str(HERE / "python"),
        "--group",
        group,
    ]
    environment = os.environ | {"UV_PROJECT_ENVIRONMENT": str(folder), "UV_PYTHON_DOWNLOADS": "never"}
    environment.pop("VIRTUAL_ENV", None)
    with locked(folder):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    if done.returncode:
        pytest.skip(f"the clients cannot be installed: {one_line(done.stderr)}")
    return folder / "bin" / "python"


def node_folder() -> Path:
    """A folder with the Node clients and our programs."""
    return install_packages(HERE / "node", "clients/node")


@pytest.fixture(scope="session")
def ollama_command() -> Path:
    """Ollama's own command, built from its Go module, once per version."""

    def build(folder: Path) -> None:
        flags = f"-X github.com/ollama/ollama/version.Version={OLLAMA_VERSION}"
        command = ["nice", "-n", "10", go(), "install", "-ldflags", flags, f"github.com/ollama/ollama@v{OLLAMA_VERSION}"]
        environment = os.environ | {"GOBIN": str(folder), "GOTOOLCHAIN": "auto"}
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=1800)

    try:
        return cached(f"ollama-{OLLAMA_VERSION}", build) / "ollama"
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Ollama's command cannot be built: {one_line(error.stderr)}")
