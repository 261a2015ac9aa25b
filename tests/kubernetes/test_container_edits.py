"""What a container is given so that its limits hold, and what it is not touched by."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aimgpu.domain import Level
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.protocols import Enforcement
from aimgpu.kubernetes.node.cdi import ContainerEdits, SpecFolder
from aimgpu.kubernetes.node.grants import NodeGrants, NodeSlot, PodTenant, staged_library
from aimgpu.ledger import Ledger
from aimgpu.units import GIB

LIBRARY = "/var/lib/aimgpu/lib/0123/libaimgpu.so"


class Enforcing:
    """An isolator that preloads a library."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def enforce(self, *_grant: Any, grouped: bool) -> Enforcement:
        assert not grouped
        return Enforcement(level=Level.RUNTIME, mechanism="interposer", environment=self._environment)


def edits(tmp_path: Path, **environment: str) -> ContainerEdits:
    isolator: Any = Enforcing(environment)
    hardware = SimulatedHardware([("MI300X", 1)])
    (device,) = hardware.read_devices()
    (partition,) = device.layout.partitions
    ledger = Ledger.open(tmp_path / "ledger.db")
    grants = NodeGrants(hardware=hardware, ledger=ledger, isolator=isolator, node="node1")
    slot = NodeSlot(device_id=device.id, partition_id=partition.id, memory_bytes=GIB)
    (instance,) = grants.charge([PodTenant(id="one", owner="team/one", slots=(slot,))])
    return grants.enforce(instance).edits


@pytest.mark.parametrize("preloaded", [LIBRARY, f"{LIBRARY}:/usr/lib/of-the-agent.so"])
def test_what_an_image_or_a_pod_preloads_itself_is_kept(tmp_path: Path, preloaded: str) -> None:
    """A variable of ours would replace theirs, whoever sets it; and what the agent preloads is no business of a pod."""
    found = edits(tmp_path, LD_PRELOAD=preloaded, AIMGPU_FAIL="open")
    assert "LD_PRELOAD" not in found.environment
    assert [(mount.host_path, mount.container_path) for mount in found.mounts] == [
        (LIBRARY, LIBRARY),
        ("/var/lib/aimgpu/lib/0123/ld.so.preload", "/etc/ld.so.preload"),
    ]
    assert found.checks == ()


def test_a_container_that_was_promised_its_limits_starts_only_where_its_c_library_can_load_ours(tmp_path: Path) -> None:
    found = edits(tmp_path, LD_PRELOAD=LIBRARY, AIMGPU_FAIL="closed")
    SpecFolder("example.com/gpu", tmp_path).write("claim", {"": found})
    (device,) = json.loads((tmp_path / "example.com-gpu-claim.json").read_text())["devices"]
    (hook,) = device["containerEdits"]["hooks"]
    assert hook["hookName"] == "startContainer"  # in the container, with its loader
    check, loader, library = hook["args"]
    assert (check, library) == (hook["path"], LIBRARY)
    assert check in {mount["containerPath"] for mount in device["containerEdits"]["mounts"]}
    assert Path(loader).is_file()  # the tests run on glibc


def test_another_build_of_the_library_leaves_that_of_running_containers_alone(tmp_path: Path) -> None:
    source = tmp_path / os.uname().machine / "libaimgpu.so"
    source.parent.mkdir()
    stage = staged_library(lambda: source, lambda: source, tmp_path / "lib")
    source.write_bytes(b"first")
    first = stage()
    before = first.stat()
    assert stage() == first
    assert first.stat() == before
    for name in (first.name, "ld.so.preload"):  # cut short when the node lost its power
        first.with_name(name).write_bytes(b"")
    assert stage() == first
    source.write_bytes(b"second")
    second = stage()
    assert [path.read_bytes() for path in (first, second)] == [b"first", b"second"]
    for path in (first, second):
        assert path.with_name("ld.so.preload").read_text() == f"{path}\n"
