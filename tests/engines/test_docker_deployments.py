"""Deployments whose instances are containers, through the controller."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FakeStore, deployment, size_by_name
from tests.engines.docker_places import Place
from tests.programs.engine import ScriptedEngine

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.domain import PROGRAM, Deployment, EngineOverrides, InstanceState, UserProgram
from aimgpu.engines.launchers.container import INSTANCE_LABEL, OWN_FOLDER
from aimgpu.engines.launchers.docker import DockerLauncher
from aimgpu.engines.launchers.docker_api import DockerApi
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.program.engine import ProgramEngine
from aimgpu.engines.protocols import Command, LaunchRequest
from aimgpu.errors import EngineUnavailable, InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger

WaitUntil = Callable[..., None]

TIMING = Timing(load_timeout_seconds=60, poll_seconds=0.02, drain_seconds=1, grace_seconds=10)


def boot(place: Place, home: Path, image: str | None = None) -> Controller:
    home.mkdir(exist_ok=True)
    by_deployment = {"dies": ("--say", "error: no memory", "--die-at-start", "1")}
    engine = ScriptedEngine(image=image or place.image, mounts=place.mounts, by_deployment=by_deployment)
    return Controller(
        Dependencies(
            hardware=SimulatedHardware([("MI300X", 1)], home / "gpus.json"),
            ledger=Ledger.open(home / "ledger.sqlite3"),
            isolator=MechanismChooser(),
            engines={"scripted": engine, PROGRAM: Mounted(place)},
            launchers={"process": ProcessLauncher(home), "docker": DockerLauncher(home, place.socket)},
            models=FakeStore(),
            size=size_by_name,
            runs=home / "runs",
            node="here",
            timing=TIMING,
        )
    )


class Mounted(ProgramEngine):
    """Images of these tests are empty: what a shell needs is mounted."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def command(self, request: LaunchRequest) -> Command:
        command = super().command(request)
        return replace(command, mounts=(*command.mounts, *self._place.mounts))


def in_docker(name: str) -> Deployment:
    return replace(deployment(name), launcher="docker")


def test_containers_are_charged_adopted_after_a_restart_and_released(place: Place, tmp_path: Path) -> None:
    first = boot(place, tmp_path / "home")
    outcome = first.apply([in_docker("chat"), in_docker("dies"), deployment("beside")])
    states = {one.deployment: one.state for one in outcome.instances}
    assert states == {"chat": InstanceState.READY, "dies": InstanceState.FAILED, "beside": InstanceState.READY}
    failed = next(one for one in outcome.instances if one.deployment == "dies")
    assert failed.last_lines == ("error: no memory",)
    assert {grant.deployment for grant in first._dependencies.ledger.grants()} == {"chat", "beside"}
    before = {one.deployment: one.process for one in first.instances() if one.process}
    first.close()

    second = boot(place, tmp_path / "home")
    second.reconcile()
    assert {one.deployment: one.process for one in second.instances() if one.process} == before
    second.release()
    assert second._dependencies.ledger.grants() == ()
    assert [dict(launcher.find_started()) for launcher in second._dependencies.launchers.values()] == [{}, {}]
    second.close()


def test_the_image_of_the_stack_file_runs_instead_of_the_engines_own(place: Place, tmp_path: Path) -> None:
    """The engine's own is nowhere, so that the start would fail with it."""
    controller = boot(place, tmp_path / "home", image="localhost:1/none/such:1")
    mine = replace(in_docker("chat"), overrides=EngineOverrides(image=place.image))
    (one,) = controller.apply([mine]).instances
    assert one.state is InstanceState.READY, one.reason
    docker = DockerApi(place.socket)
    (container,) = docker.list_ids(f"{INSTANCE_LABEL}={one.id}")
    found = docker.inspect(container)
    assert found is not None
    assert found["Config"]["Image"] == place.image
    with pytest.raises(InvalidInput, match="'image' is for containers, and the launcher is process"):
        controller.apply([replace(mine, launcher="process")])
    assert controller.instances() == (one,), "what runs is left alone"
    controller.release()
    controller.close()


def test_without_docker_what_runs_as_a_process_is_left_running(tmp_path: Path) -> None:
    nobody = Place(socket=tmp_path / "nobody.sock", image="engine:1", mounts=())
    controller = boot(nobody, tmp_path / "home")
    [before] = controller.apply([deployment("chat")]).instances
    with pytest.raises(EngineUnavailable, match="Docker is not running"):
        controller.apply([in_docker("chat"), in_docker("code")])
    assert controller.instances() == (before,)
    assert before.state is InstanceState.READY
    assert [one.launcher for one in controller.deployments()] == ["process"], "nothing else is wanted"
    controller.release()


def test_a_program_in_a_container_leaves_its_exit_code_where_the_container_may_write(
    place: Place, tmp_path: Path, wait_until: WaitUntil
) -> None:
    controller = boot(place, tmp_path / "home")
    program = UserProgram(argv=("sh", "-c", "echo said; exit 5"), directory=str(tmp_path))
    overrides = EngineOverrides(program=program, image=place.image)
    job = replace(in_docker("job"), engine=PROGRAM, overrides=overrides)
    controller.apply([job])

    def ended() -> bool:
        controller.supervise()
        return any(one.state is InstanceState.ENDED for one in controller.instances())

    wait_until(ended, "the program ended")
    (one,) = controller.instances()
    assert one.end is not None
    assert one.end.exit_code == 5
    assert (tmp_path / "home" / "runs" / one.id / OWN_FOLDER / "exit-code").read_text() == "5"
    assert one.last_lines == () or "said" in one.last_lines
    controller.release()
    controller.close()


def test_a_program_in_a_container_may_save_its_state_when_it_is_stopped(
    place: Place, tmp_path: Path, wait_until: WaitUntil
) -> None:
    controller = boot(place, tmp_path / "home")
    script = "trap 'echo yes > saved; exit' TERM; echo > began; while :; do sleep 0.1; done"
    program = UserProgram(argv=("sh", "-c", script), directory=str(tmp_path))
    controller.apply([replace(in_docker("job"), engine=PROGRAM, overrides=EngineOverrides(program=program, image=place.image))])
    wait_until((tmp_path / "began").exists, "the program runs")
    controller.release()
    assert (tmp_path / "saved").read_text() == "yes\n"
    assert controller.instances() == ()
    controller.close()
