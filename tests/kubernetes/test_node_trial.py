"""`aimgpu k8s verify-node`: a pod with the agent's rights, and what becomes of its report."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.kubernetes.api_server import serving
from tests.kubernetes.test_chart_templates import rendered

from aimgpu.cli.verify import VerifyReport, verify
from aimgpu.errors import ClusterFailed
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.cluster.node_trial import read_report, trial_pod, try_node

AGENT = "/apis/apps/v1/namespaces/gpu-sharing/daemonsets"
PODS = "/api/v1/namespaces/gpu-sharing/pods"


def agent(*options: str) -> dict[str, Any]:
    (found,) = (item for item in rendered(*options) if item["kind"] == "DaemonSet")
    return found


@pytest.mark.parametrize("layouts", ["none", "compute", "memory"])
def test_the_pod_has_the_agents_rights_and_none_of_its_folders(layouts: str) -> None:
    whole = agent(f"--set=agent.layouts={layouts},agent.runtimeClassName=nvidia")
    pod = trial_pod(whole, "gpu-1")
    spec, template = pod["spec"], whole["spec"]["template"]
    (own,), (agents,) = spec["containers"], template["spec"]["containers"]
    for key in ("image", "securityContext", "resources"):
        assert own[key] == agents[key]
    assert (spec["hostPID"], spec["runtimeClassName"], spec["nodeName"]) == (True, "nvidia", "gpu-1")
    mounted = {one["mountPath"] for one in own["volumeMounts"]}
    assert {"/dev", "/tmp"} <= mounted <= {"/dev", "/tmp", "/host/sys", "/lib/modules"}  # noqa: S108 - the pod's own
    assert {one["name"] for one in spec["volumes"]} == {one["name"] for one in own["volumeMounts"]}
    assert f"--sysfs={'/sys' if layouts == 'none' else '/host/sys'}" in own["command"]
    assert not spec["automountServiceAccountToken"]
    assert not any(key.endswith("Probe") for key in own)
    selector = whole["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items()  # the DaemonSet would take it for its own


def test_an_agent_with_simulated_gpus_is_tried_on_them() -> None:
    pod = trial_pod(agent("--set=agent.simulated=MI300X:2"), "node1")
    assert "--simulated=MI300X" in pod["spec"]["containers"][0]["command"]


def test_what_an_agent_needs_is_tried_without_a_change_and_read_again(tmp_path: Path) -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    report = verify(hardware, sysfs=tmp_path)
    tried = {trial.what for trial in report.trials}
    assert {"right to compute modes", "right to memory modes", "preload", "offer of dmem", "offer of interposer"} <= tried
    assert report.failed == 0
    text = json.dumps(report.to_json(), indent=1)
    found = VerifyReport.from_json(read_report(f"a warning\n{text}\nan end\n"))
    assert found == report


def test_a_pod_without_a_report_is_told_with_its_last_words() -> None:
    with pytest.raises(ClusterFailed, match="no such command"):
        read_report("error: no such command\n")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Failed", "reason": "OutOfpods", "message": "no room for pods"}, "no room for pods"),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no image"}}}]},
            "ErrImagePull: no image",
        ),
    ],
)
def test_a_pod_that_the_node_does_not_run_is_removed_and_the_reason_is_reported(status: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.put("/api/v1/nodes", {"metadata": {"name": "gpu-1"}})
            with pytest.raises(ClusterFailed, match="no node agent is installed"):
                await try_node(client, "gpu-1", timeout_seconds=60)
            api.put(AGENT, agent())
            trying = asyncio.ensure_future(try_node(client, "gpu-1", timeout_seconds=60))
            while not (names := [place[2] for place in api.versions() if place[0] == "pods"]):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            api.patch(f"{PODS}/{names[0]}", {"status": status})
            with pytest.raises(ClusterFailed, match=words):
                await trying
            assert not any(place[0] == "pods" for place in api.versions())

    asyncio.run(main())
