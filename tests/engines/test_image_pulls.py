"""Images are brought in the background, once, with progress; against Docker's stand-in and against Docker itself."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.control.world import FakeStore, deployment, size_by_name
from tests.engines.docker_places import Place
from tests.programs import fake_docker, real_docker, registry
from tests.programs.engine import ScriptedEngine

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.domain import InstanceState
from aimgpu.engines.launchers.docker import DockerLauncher
from aimgpu.engines.launchers.docker_api import DockerApi
from aimgpu.engines.launchers.image_pulls import PullProgress
from aimgpu.engines.protocols import Command, Mount
from aimgpu.errors import EngineFailed
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger

WaitUntil = Callable[..., None]
TIMING = Timing(load_timeout_seconds=60, poll_seconds=0.02, drain_seconds=1, grace_seconds=10)


class EnoughError(Exception):
    """Whoever wanted the image wants it no more."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Docker without the image, and the place that it comes from."""

    place: Place
    state: fake_docker.FakeDocker | registry.Registry

    @property
    def image(self) -> str:
        return self.place.image

    def hold(self) -> threading.Event:
        """Pulls stop half-way until it is set."""
        self.state.gate = threading.Event()
        return self.state.gate

    def is_here(self) -> bool:
        return DockerApi(self.place.socket).has_image(self.image)

    def command(self, run_directory: Path) -> Command:
        return self.place.command(run_directory)


@pytest.fixture(params=["stand-in", "real"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    if request.param == "real":
        mounts = tuple(Mount(path=path) for path in real_docker.program_folders())
        socket = request.getfixturevalue("dockerd")
        with ExitStack() as stack:
            with real_docker.network_of(socket):  # a socket stays in the network in which it was made
                state = stack.enter_context(registry.serve_registry())
            yield Source(place=Place(socket=socket, image=state.image, mounts=mounts), state=state)
        return
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        docker.registry.add("vendor/engine:2")
        yield Source(place=Place(socket=docker.socket, image="vendor/engine:2", mounts=()), state=docker)


def in_background(work: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_an_image_is_brought_with_its_progress_and_then_started(source: Source, tmp_path: Path) -> None:
    launcher, run = DockerLauncher(tmp_path / "home", source.place.socket), tmp_path / "run"
    percents: list[int | None] = []
    launcher.fetch(source.command(run), run, percents.append, lambda: None)
    assert source.is_here()
    known = [percent for percent in percents if percent is not None]
    assert known == sorted(known)
    assert known[-1] == 99
    assert any("Pull complete" in line for line in launcher.last_lines(run, 50))
    process = launcher.start("chat-0", source.command(run), run)
    assert any("Pull complete" in line for line in launcher.last_lines(run, 50)), "the engine goes on with this log"
    launcher.stop(process, grace_seconds=10)
    launcher.fetch(source.command(run), run, percents.append, lambda: None)
    assert len(source.state.pulls) == 1, "what is here is not pulled again"


def test_two_who_want_one_image_share_its_pull_and_one_may_leave(source: Source, tmp_path: Path, wait_until: WaitUntil) -> None:
    gate = source.hold()
    launcher = DockerLauncher(tmp_path / "home", source.place.socket)
    waiting: set[str] = set()
    leaving = threading.Event()

    def leave() -> None:
        if leaving.is_set():
            raise EnoughError

    first, first_errors = in_background(
        lambda: launcher.fetch(source.command(tmp_path / "a"), tmp_path / "a", lambda _: waiting.add("a"), leave)
    )
    second, second_errors = in_background(
        lambda: launcher.fetch(source.command(tmp_path / "b"), tmp_path / "b", lambda _: waiting.add("b"), lambda: None)
    )
    wait_until(lambda: waiting == {"a", "b"}, "both wait for the pull")  # one that left alone would end it
    leaving.set()
    first.join(60)
    assert [type(error) for error in first_errors] == [EnoughError]
    gate.set()
    second.join(60)
    assert second_errors == []
    assert source.is_here()
    assert len(source.state.pulls) == 1
    assert source.state.broken_off == []


def test_a_pull_that_nobody_wants_any_more_ends_and_may_begin_again(
    source: Source, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = source.hold()
    launcher = DockerLauncher(tmp_path / "home", source.place.socket)
    leaving = threading.Event()

    def leave() -> None:
        if leaving.is_set():
            raise EnoughError

    waiter, errors = in_background(
        lambda: launcher.fetch(source.command(tmp_path / "a"), tmp_path / "a", lambda _: None, leave)
    )
    wait_until(lambda: bool(source.state.pulls), "the pull has begun")
    leaving.set()
    waiter.join(60)
    assert [type(error) for error in errors] == [EnoughError]
    wait_until(lambda: bool(source.state.broken_off), "Docker stopped the pull")
    assert not source.is_here()
    gate.set()
    launcher.fetch(source.command(tmp_path / "a"), tmp_path / "a", lambda _: None, lambda: None)
    assert source.is_here()


@pytest.mark.parametrize(
    ("said", "way"),
    [
        ("manifest for vendor/engine:9 not found: manifest unknown: manifest unknown", "There is no such tag"),
        (
            "pull access denied for vendor/engine, repository does not exist or may require 'docker login': denied",
            "docker login",
        ),
        ("toomanyrequests: You have reached your pull rate limit.", "wait, or log in first"),
        ('Get "https://registry.example/v2/": dial tcp: lookup registry.example: no such host', "cannot be reached"),
        ("write /var/lib/docker/tmp/GetImageBlob123: no space left on device", "docker system prune"),
        ("something new", "Try: docker pull vendor/engine:9"),
    ],
)
def test_a_registry_that_refuses_is_told_with_what_to_do(tmp_path: Path, said: str, way: str) -> None:
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        docker.refusals["vendor/engine:9"] = said
        launcher = DockerLauncher(tmp_path / "home", docker.socket)
        with pytest.raises(EngineFailed) as caught:
            launcher.fetch(Command(argv=("x",), image="vendor/engine:9"), tmp_path / "run", lambda _: None, lambda: None)
    assert said in caught.value.message
    assert way in caught.value.message
    assert caught.value.hint == "Try: docker pull vendor/engine:9"


def test_a_registry_that_is_not_there_is_told_by_docker_itself(dockerd: Path, tmp_path: Path) -> None:
    launcher = DockerLauncher(tmp_path / "home", dockerd)
    command = Command(argv=("x",), image="127.0.0.1:1/no/such:1")
    with pytest.raises(EngineFailed, match=r"cannot pull 127\.0\.0\.1:1/no/such:1.*cannot be reached"):
        launcher.fetch(command, tmp_path / "run", lambda _: None, lambda: None)


def test_percent_never_falls_when_a_large_layer_shows_up_late() -> None:
    progress = PullProgress()
    seen = []
    for layer, status, current, total in (
        ("a", "Downloading", 10, 10),
        ("b", "Downloading", 0, 1000),
        ("b", "Downloading", 500, 1000),
        ("b", "Extracting", 1000, 1000),
    ):
        progress.note({"id": layer, "status": status, "progressDetail": {"current": current, "total": total}})
        seen.append(progress.percent or 0)
    progress.note({"status": "Digest: sha256:1"})
    assert seen == sorted(seen)
    assert 0 < seen[0] < 100
    assert seen[-1] <= 99


def make_dependencies(source: Source, home: Path) -> Controller:
    home.mkdir(exist_ok=True)
    return Controller(
        Dependencies(
            hardware=SimulatedHardware([("MI300X", 1)], home / "gpus.json"),
            ledger=Ledger.open(home / "ledger.sqlite3"),
            isolator=MechanismChooser(),
            engines={"scripted": ScriptedEngine(image=source.image, mounts=source.place.mounts)},
            launchers={"docker": DockerLauncher(home, source.place.socket)},
            models=FakeStore(),
            size=size_by_name,
            runs=home / "runs",
            node="here",
            timing=TIMING,
        )
    )


def test_a_deployment_shows_how_far_its_image_is_and_a_release_ends_the_pull(
    source: Source, tmp_path: Path, wait_until: WaitUntil
) -> None:
    source.hold()
    controller = make_dependencies(source, tmp_path / "home")
    items = [replace(deployment(name), launcher="docker") for name in ("chat", "code")]
    percents: list[int | None] = []

    def work() -> None:
        controller.apply(items, emit=lambda event: percents.append(event.data.get("percent")))

    applying, errors = in_background(work)

    def both_tell() -> bool:
        loading = [one for one in controller.instances() if one.state is InstanceState.LOADING and one.percent]
        return len(loading) == 2

    wait_until(both_tell, "both are loading, with a percent")
    assert {one.reason for one in controller.instances()} == {f"fetching the image {source.image}"}
    controller.release(["chat"])
    assert [one.deployment for one in controller.instances()] == ["code"]
    assert source.state.broken_off == []
    controller.release()
    wait_until(lambda: bool(source.state.broken_off), "Docker stopped the pull")
    applying.join(60)
    assert errors == []
    assert (controller.instances(), controller._dependencies.ledger.grants()) == ((), ())
    assert len(source.state.pulls) == 1
    assert any(percents)
    controller.close()
