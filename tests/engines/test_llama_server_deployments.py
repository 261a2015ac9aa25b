"""Deployments of llama.cpp on a GPU, through the controller: `llama-server` where there is one, else the CPU, and said so."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FakeStore, deployment, status_sources
from tests.programs.daemon import size_one_gib

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import Deployment, Device, Footprint, InstanceState, Partition
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.llamacpp.engine import LlamaCppEngine
from aimgpu.engines.protocols import LocalModel, Progress
from aimgpu.hardware.protocols import Identity
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger


class RealLooking(SimulatedHardware):
    """Names its Device to engines as a real one is named."""

    def identify(self, device: Device, partition: Partition) -> Identity:
        known = super().identify(device, partition)
        return replace(known, environment={**known.environment, "CUDA_VISIBLE_DEVICES": "GPU-1"})


class Models(FakeStore):
    def find(self, model: str) -> LocalModel:
        return LocalModel(name=model, path=Path("/models") / f"{model}.gguf", format="gguf")

    def fetch(self, model: str, progress: Progress) -> LocalModel:
        del progress
        return self.find(model)


def boot(home: Path) -> Controller:
    home.mkdir(exist_ok=True)
    timing = Timing(load_timeout_seconds=60, poll_seconds=0.02, drain_seconds=1, grace_seconds=10, restart_delay_seconds=0.01)
    engine = LlamaCppEngine(cache_directory=home / "cache", has_gpu=True)
    return Controller(
        Dependencies(
            hardware=RealLooking([("H200-141", 1)], home / "gpus.json"),
            ledger=Ledger.open(home / "ledger.sqlite3"),
            isolator=MechanismChooser(),
            engines={"llamacpp": engine},
            launchers={"process": ProcessLauncher(home)},
            models=Models(),
            size=size_small,
            runs=home / "runs",
            node="here",
            timing=timing,
        )
    )


def size_small(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
    return replace(size_one_gib(deployment, engine, local, vendor), context_tokens=512)


def of_model(name: str, model: str) -> Deployment:
    return replace(deployment(name), model=model, engine="llamacpp")


@pytest.mark.usefixtures("llama_server")
def test_through_the_controller_it_is_charged_adopted_after_a_restart_and_released(tmp_path: Path) -> None:
    first = boot(tmp_path / "home")
    outcome = first.apply([of_model("chat", "m"), of_model("again", "m+port-taken-once"), of_model("dies", "m+oom")])
    states = {one.deployment: one.state for one in outcome.instances}
    assert states == {"chat": InstanceState.READY, "again": InstanceState.READY, "dies": InstanceState.FAILED}
    failed = next(one for one in outcome.instances if one.deployment == "dies")
    assert "not enough GPU memory: it wanted 5664.67 MiB more" in str(failed.reason)
    assert {grant.deployment for grant in first._dependencies.ledger.grants()} == {"chat", "again"}
    before = {one.deployment: one.process for one in first.instances() if one.process}
    first.close()

    second = boot(tmp_path / "home")
    second.reconcile()
    assert {one.deployment: one.process for one in second.instances() if one.process} == before
    assert describe_status(status_sources(second), Addresses(version="1", pid=1, url="http://127.0.0.1:1"))["notes"] == []
    second.release()
    assert second._dependencies.ledger.grants() == ()
    assert dict(second._dependencies.launchers["process"].find_started()) == {}
    second.close()


def test_without_a_program_it_serves_on_the_cpu_and_every_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("AIMGPU_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(Models, "find", lambda _self, model: LocalModel(name=model, path=small_model, format="gguf"))
    controller = boot(tmp_path / "home")
    told: list[str] = []
    outcome = controller.apply([of_model("chat", "m")], emit=lambda event: told.append(event.text))
    assert [one.state for one in outcome.instances] == [InstanceState.READY]
    assert "chat: llamacpp runs on the CPU: no llama-server found" in told
    status = describe_status(status_sources(controller), Addresses(version="1", pid=1, url="http://127.0.0.1:1"))
    assert status["notes"] == ["chat runs on the CPU: no llama-server found"]
    controller.release()
    controller.close()
