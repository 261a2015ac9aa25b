"""Containers in a control group of ours: where Docker can, and what is done where it cannot."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.programs import fake_docker, real_docker

from aimgpu.engines.launchers import groups
from aimgpu.engines.launchers.docker import DockerLauncher
from aimgpu.engines.protocols import Command, Mount
from aimgpu.errors import EngineFailed
from aimgpu.isolation.dmem import find_cgroup_root

KEEPS_GROUPS = {"CgroupDriver": "cgroupfs", "CgroupVersion": "2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stands in for where cgroup v2 is mounted, with a group of ours."""
    root = tmp_path / "cgroup"
    (root / "aimgpu" / "chat-0").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("dmem\n")
    return root


@pytest.fixture
def group() -> Iterator[Path]:
    """A real one."""
    root = find_cgroup_root()
    if not (root / "cgroup.procs").exists() or not os.access(root, os.W_OK):
        pytest.skip("no cgroup v2 that may be written")
    parent = root / f"aimgpu-containers-{os.getpid()}"
    made = parent / "chat-0"
    try:
        made.mkdir(parents=True)
    except OSError:
        pytest.skip("may not make a control group")
    yield made
    made.rmdir()
    parent.rmdir()


def sleeper(group: Path | None, image: str = "engine:1") -> Command:
    return Command(argv=(sys.executable, "-c", "import time; time.sleep(300)"), image=image, control_group=group)


def test_docker_says_whether_containers_can_join(tmp_path: Path) -> None:
    others: tuple[dict[str, str], ...] = (
        {"CgroupDriver": "systemd", "CgroupVersion": "2"},
        {"CgroupDriver": "cgroupfs", "CgroupVersion": "1"},
        {},
    )
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        for info in (KEEPS_GROUPS, *others):
            docker.info = dict(info)
            assert DockerLauncher(tmp_path / "home", docker.socket).joins_groups is (info == KEEPS_GROUPS)


def test_without_docker_nothing_joins_and_nothing_is_remembered(tmp_path: Path) -> None:
    launcher = DockerLauncher(tmp_path / "home", tmp_path / "d.sock")
    assert not launcher.joins_groups
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        docker.info = KEEPS_GROUPS
        assert launcher.joins_groups


def test_a_container_is_made_below_the_group(tmp_path: Path, folder: Path) -> None:
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        docker.info, docker.cgroup_root = KEEPS_GROUPS, folder
        launcher = DockerLauncher(tmp_path / "home", docker.socket)
        process = launcher.start("chat-0", sleeper(folder / "aimgpu" / "chat-0"), tmp_path / "run")
        (container,) = docker.containers.values()
        assert container.body["HostConfig"]["CgroupParent"] == "/aimgpu/chat-0"
        assert groups.holds(folder / "aimgpu" / "chat-0", process.pid)
        launcher.stop(process, grace_seconds=5)
    with pytest.raises(EngineFailed, match="is not a control group"):
        groups.path_from_root(tmp_path / "elsewhere")


def test_one_that_docker_put_elsewhere_does_not_run(tmp_path: Path, folder: Path) -> None:
    """A Docker of another machine, or beside a daemon in a container, knows other groups by these names."""
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        docker.info = KEEPS_GROUPS
        launcher = DockerLauncher(tmp_path / "home", docker.socket)
        with pytest.raises(EngineFailed, match="Docker did not put the container of chat-0 into"):
            launcher.start("chat-0", sleeper(folder / "aimgpu" / "chat-0"), tmp_path / "run")
        assert docker.containers == {}
        assert launcher.find_started() == {}
        process = launcher.start("chat-0", sleeper(None), tmp_path / "run")
        launcher.stop(process, grace_seconds=5)


def test_in_a_real_cgroup_a_container_of_docker_itself_is_below_the_group(dockerd: Path, tmp_path: Path, group: Path) -> None:
    launcher = DockerLauncher(tmp_path / "home", dockerd)
    mounts = tuple(Mount(path=path) for path in real_docker.program_folders())
    process = launcher.start("chat-0", replace(sleeper(group, real_docker.IMAGE), mounts=mounts), tmp_path / "run")
    try:
        assert groups.holds(group, process.pid)
        assert not groups.holds(group, os.getpid())
    finally:
        launcher.stop(process, grace_seconds=5)
