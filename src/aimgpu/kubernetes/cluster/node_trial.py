"""A pod like the node agent's that tries on one node what an agent needs there, and ends."""

import asyncio
import copy
import json
import secrets
from typing import Any

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DAEMON_SETS, NODES, PODS
from aimgpu.kubernetes.vocabulary.names import AGENT_ACCOUNT

_OF_THE_AGENT = {"plugins", "registry", "device-plugins", "pod-resources", "cdi", "state", "run"}  # its volumes on the node
_SYS = "/host/sys"  # where the chart mounts the node's, for an agent that changes layouts
_PROBES = ("readinessProbe", "startupProbe", "livenessProbe", "ports")
_FIXED = {"restartPolicy": "Never", "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0}
_NEVER_STARTS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError"}


async def find_agent(client: Client) -> Object:
    """The DaemonSet of the chart. Raises ClusterFailed where there is none, or several."""
    found, _ = await client.list(DAEMON_SETS, fields=f"metadata.name={AGENT_ACCOUNT}")
    if len(found) != 1:
        problem = "several releases of AIM GPU Sharing are installed" if found else "no node agent is installed in this cluster"
        raise ClusterFailed(problem, hint="Install the chart once: its agent's image and rights are what is tried.")
    return found[0]


def trial_pod(agent: Object, node: str) -> Object:
    """With the agent's image and rights, and none of its folders on the node: it runs beside an agent and disturbs none."""
    spec = copy.deepcopy(agent["spec"]["template"]["spec"])
    (container, *_) = spec["containers"]
    mounts = [one for one in container.get("volumeMounts") or () if one["name"] not in _OF_THE_AGENT]
    simulated = [word.partition("=")[2] for word in container.get("args") or () if word.startswith("--simulated=")]
    command = ["python", "-m", "aimgpu", "doctor", "--verify", "--json", "--report=/tmp/report.json"]
    command += [f"--sysfs={_SYS if any(one['mountPath'] == _SYS for one in mounts) else '/sys'}"]
    command += [f"--simulated={one.partition(':')[0]}" for one in simulated]
    folders = [{"name": name, "value": f"/tmp/{name.lower()}"} for name in ("AIMGPU_HOME", "AIMGPU_CACHE")]  # noqa: S108 - the pod's own
    container = {key: value for key, value in container.items() if key not in (*_PROBES, "args", "lifecycle")}
    container |= {"command": command, "volumeMounts": mounts, "env": [*(container.get("env") or ()), *folders]}
    volumes = [one for one in spec.get("volumes") or () if one["name"] not in _OF_THE_AGENT]
    left_out = ("affinity", "nodeSelector", "priorityClassName", "serviceAccount")  # any node may be tried
    spec = {key: value for key, value in spec.items() if key not in left_out}
    labels = {"app.kubernetes.io/part-of": "aim-gpu-sharing", "app.kubernetes.io/component": "verify"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"aimgpu-verify-{secrets.token_hex(4)}", "labels": labels},
        "spec": {**spec, **_FIXED, "nodeName": node, "containers": [container], "volumes": volumes},
    }


async def try_node(client: Client, node: str, *, timeout_seconds: float) -> dict[str, Any]:
    """The report of the pod, which is removed. Raises ClusterFailed with the reason where it gives none."""
    await client.get(NODES, node)
    agent = await find_agent(client)
    namespace = agent["metadata"]["namespace"]
    pod = await client.create(PODS, trial_pod(agent, node), namespace)
    name = pod["metadata"]["name"]
    try:
        async with asyncio.timeout(timeout_seconds):
            await _end(client, name, namespace)
        path = PODS.path(namespace, name, "log")
        text = "\n".join([line async for line in client.read_lines(path)])
    except TimeoutError as error:
        raise ClusterFailed(
            f"the pod on {node} did not end within {timeout_seconds:g} s",
            hint="Give it more with --timeout, or look at the node: kubectl describe node.",
        ) from error
    finally:
        await client.delete(PODS, name, namespace)
    return read_report(text)


def read_report(log: str) -> dict[str, Any]:
    """From a log with messages before it. Raises ClusterFailed with the log's end where there is none."""
    start = 0 if log.startswith("{") else log.find("\n{") + 1
    try:
        found, _ = json.JSONDecoder().raw_decode(log[start:])
    except ValueError as error:
        raise ClusterFailed(f"the pod ended without a report: {log.strip()[-500:] or 'it printed nothing'}") from error
    report: dict[str, Any] = found
    return report


async def _end(client: Client, name: str, namespace: str) -> None:
    """Return when the pod has ended."""
    async for event in client.watch(PODS, namespace, fields=f"metadata.name={name}"):
        status = event.object.get("status") or {}
        if event.type == "DELETED":
            raise ClusterFailed("the pod was removed before it ended")
        if status.get("phase") in ("Succeeded", "Failed"):
            if not status.get("containerStatuses"):
                raise ClusterFailed(f"the node did not take the pod: {status.get('message') or status.get('reason')}")
            return
        for one in status.get("containerStatuses") or ():
            waiting = one["state"].get("waiting") or {}
            if waiting.get("reason") in _NEVER_STARTS:
                raise ClusterFailed(f"the pod does not start: {waiting['reason']}: {waiting.get('message')}")
