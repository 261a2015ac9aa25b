import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from aimgpu.cli.main import cli
from aimgpu.engines.launchers.compose import ComposeService, render_compose
from aimgpu.engines.protocols import Command, Mount
from aimgpu.errors import InvalidInput, PlacementRefused

GIB = 1 << 30
AMD = ("/dev/kfd", "/dev/dri/renderD130")


def service(
    name: str, gib: int, *, port: int = 8001, command: Command | None = None, place: str = "gpu0/spx-0"
) -> ComposeService:
    default = Command(
        argv=("vllm", "serve", "m"), image="vllm", device_nodes=AMD, secrets={"VLLM_API_KEY": "k", "HF_TOKEN": "t"}
    )
    return ComposeService(name=name, engine="vllm", command=command or default, port=port, memory_bytes={place: gib * GIB})


def test_two_engines_on_one_gpu_add_up_and_start_one_after_the_other() -> None:
    text = render_compose([service("chat", 96), service("code", 76, port=8002)], {"gpu0/spx-0": 192 * GIB})
    assert f"# gpu0/spx-0: chat 96GiB + code 76GiB = 172GiB of 192GiB ({172 * GIB} of {192 * GIB} bytes)" in text
    services = yaml.safe_load(text)["services"]
    assert "depends_on" not in services["chat"]
    assert services["code"]["depends_on"] == {"chat": {"condition": "service_healthy"}}
    assert services["chat"]["devices"] == [f"{node}:{node}" for node in AMD]
    assert "ipc" not in services["chat"], "shared memory of its own"
    assert services["chat"]["shm_size"] == 8 << 30
    assert "8002/health" in services["code"]["healthcheck"]["test"][-1]


def test_engines_on_different_partitions_start_side_by_side() -> None:
    services = yaml.safe_load(
        render_compose([service("a", 1), service("b", 1, place="gpu0/cpx-1")], {"gpu0/spx-0": GIB, "gpu0/cpx-1": GIB})
    )["services"]
    assert "depends_on" not in services["b"]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(PlacementRefused, match="192GiB, and a, b need 200GiB"):
        render_compose([service("a", 100), service("b", 100)], {"gpu0/spx-0": 192 * GIB})


def test_secrets_stay_outside_and_dollars_stay_dollars() -> None:
    command = Command(
        argv=("/bin/sh", "-c", "echo $HOME"),
        image="i",
        environment={"PRICE": "5$"},
        secrets={"VLLM_API_KEY": "k3y", "HF_TOKEN": "t0ken"},
        mounts=(Mount(path="/models/m.gguf"), Mount(path="/cache", writable=True)),
    )
    text = render_compose([service("a", 1, command=command)], {"gpu0/spx-0": GIB})
    assert "k3y" not in text
    assert "t0ken" not in text
    (one,) = yaml.safe_load(text)["services"].values()
    assert one["command"] == ["-c", "echo $$HOME"]
    assert one["environment"] == {
        "PRICE": "5$$",
        "VLLM_API_KEY": "${AIMGPU_ENGINE_KEY:?choose a key}",
        "HF_TOKEN": "${HF_TOKEN:-}",
    }
    assert one["volumes"] == ["/models/m.gguf:/models/m.gguf:ro", "/cache:/cache"]


def test_an_nvidia_gpu_is_reserved_by_uuid_and_simulation_is_named() -> None:
    command = Command(argv=("vllm",), image="i", environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    text = render_compose([service("a", 1, command=command)], {"gpu0/spx-0": GIB}, simulated=True)
    (one,) = yaml.safe_load(text)["services"].values()
    reserved = {"driver": "nvidia", "device_ids": ["GPU-1"], "capabilities": ["gpu"]}
    assert one["deploy"]["resources"]["reservations"]["devices"] == [reserved]
    assert text.startswith("# The GPU is simulated")


def test_the_command_prints_a_file_for_a_stack(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    models = "{big: {model: Qwen/Qwen2.5-7B-Instruct, engine: vllm, gpu: {fraction: 0.5}}"
    models += ", small: {model: Qwen/Qwen2.5-7B-Instruct, engine: vllm, gpu: {fraction: 0.4}}}"
    stack.write_text(f"gpus: {{simulated: MI300X}}\nmodels: {models}\n")
    result = CliRunner().invoke(cli, ["compose", "-f", str(stack), "--first-port", "9000"])
    assert result.exit_code == 0, result.output
    services = yaml.safe_load(result.output)["services"]
    parts = [one["command"][one["command"].index("--gpu-memory-utilization") + 1] for one in services.values()]
    assert parts == ["0.5000", "0.3999"]  # rounded down: together never more than was granted
    assert [one["command"][one["command"].index("--port") + 1] for one in services.values()] == ["9000", "9001"]
    assert str(tmp_path) not in result.output


def test_a_server_of_the_users_own_is_refused(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("gpus: {simulated: MI300X}\nmodels: {own: {engine: tei, model: o/m, image: a/b, gpu: {memory: 1GiB}}}\n")
    result = CliRunner().invoke(cli, ["compose", "-f", str(stack)])
    assert isinstance(result.exception, InvalidInput)
    assert "own: `aimgpu compose` writes no server of your own" in result.exception.message


def test_a_compose_program_takes_the_file(tmp_path: Path) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    amd = Command(
        argv=("vllm", "serve", "$HOME"),
        image="i",
        device_nodes=("/dev/kfd", "/dev/dri/renderD128"),
        environment={"ROCR_VISIBLE_DEVICES": "0"},
        secrets={"VLLM_API_KEY": "s3cret"},
        mounts=(Mount(path="/models"),),
    )
    nvidia = Command(argv=("vllm",), image="i", environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    services = [service("a", 1, command=amd), service("b", 1, command=nvidia), service("c", 1)]
    file = tmp_path / "compose.yaml"
    file.write_text(render_compose(services, {"gpu0/spx-0": 4 * GIB}))
    environment = {**os.environ, "AIMGPU_ENGINE_KEY": "chosen"}
    result = subprocess.run([program, "-f", file, "config"], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    understood = yaml.safe_load(result.stdout)["services"]
    assert understood["a"]["environment"]["VLLM_API_KEY"] == "chosen"
    assert understood["a"]["command"] == ["serve", "$$HOME"]
    without = subprocess.run(
        [program, "-f", file, "config"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=False
    )
    assert without.returncode != 0
    assert "choose a key" in without.stderr


def test_a_model_that_would_only_sleep_is_refused_and_several_gpus_are_all_seen(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    model = "model: Qwen/Qwen2.5-7B-Instruct, engine: vllm, keep: 10m"
    large = f"{{{model}, gpu: {{memory: 150GiB}}}}"
    stack.write_text(f"gpus: {{simulated: MI300X}}\nmodels: {{a: {large}, b: {large}}}\n")
    result = CliRunner().invoke(cli, ["compose", "-f", str(stack)])
    assert result.exit_code != 0
    assert "keep b asleep until a request wakes it" in str(result.exception)
    stack.write_text(f"gpus: {{simulated: H200, count: 2}}\nmodels: {{a: {{{model}, gpu: {{whole: 2}}}}}}\n")
    result = CliRunner().invoke(cli, ["compose", "-f", str(stack)])
    assert result.exit_code == 0, result.output
    assert "--tensor-parallel-size" in yaml.safe_load(result.output)["services"]["a"]["command"]
