import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.fixtures import pytest_runtest_makereport
from tests.cluster.situation import HEADING, situation, telling, unready_pods
from tests.cluster.waiting import wait_for

MISPLACED = "node(s) didn't match Pod's node affinity/selector"


def pod(name: str, phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "web", "name": name}, "spec": {"nodeName": "node1"}, "status": {"phase": phase, **status}}


def report_of_failure(item: object, text: str) -> pytest.TestReport:
    """What pytest reports of a test of that item which failed with that text."""
    report = pytest.TestReport(
        nodeid="test", location=("test", 0, "test"), keywords={}, outcome="failed", longrepr=text, when="call"
    )
    steps = pytest_runtest_makereport(item)  # type: ignore[arg-type]
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(report)
    return report


def test_only_pods_that_are_not_ready_are_listed_each_with_its_reason() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes\nare available"}
    pulling = {"name": "main", "ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    crashed = {"name": "main", "ready": False, "state": {"terminated": {"reason": "Error", "exitCode": 3}}}
    pods = [
        pod("ready", "Running", conditions=[{"type": "Ready", "status": "True"}]),
        pod("done", "Succeeded"),
        pod("homeless", "Pending", conditions=[unschedulable]) | {"spec": {}},
        pod("pulling", "Pending", containerStatuses=[pulling]),
        pod("crashed", "Failed", containerStatuses=[crashed]),
    ]

    assert unready_pods(json.dumps({"items": pods})) == [
        "web/homeless, Pending, no node, 0/1 nodes are available",
        "web/pulling, Pending, node1, main: waiting ImagePullBackOff",
        "web/crashed, Failed, node1, main: terminated Error 3",
    ]
    assert unready_pods('{"items": []}') == ["none"]
    assert unready_pods("the connection was refused") == ["the connection was refused"]


def test_the_situation_is_short_and_keeps_the_ends() -> None:
    def ask(*arguments: str) -> str:
        return "\n".join(f"{arguments[1]} line {number} {'x' * 500}" for number in range(1000))

    logs = {name: "\n".join(f"{name} line {number}" for number in range(1000)) for name in ("scheduler", "binder")}

    found = situation(ask, "web", "pod/chat", logs)

    assert len(found) < 6500
    for words in ("pods line 999", "events line 999", "pod/chat line 999", "scheduler line 999", "binder line 999"):
        assert words in found


def test_of_a_log_the_lines_about_the_namespace_and_trouble_are_shown() -> None:
    said = ["begin", "placing \x1b[31mweb\x1b[0m/chat", "Failed to bind other/pod", "end"]

    assert telling("\n".join(said), "web") == ["placing web/chat", "Failed to bind other/pod"]
    assert telling("begin\nend", "web") == ["begin", "end"]


def test_a_wait_that_fails_and_a_test_that_fails_say_what_the_cluster_looks_like(cluster: Cluster, namespace: str) -> None:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "1000"]}
    spec = {"nodeSelector": {"kubernetes.io/hostname": "elsewhere"}, "containers": [main]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec}, namespace)
    events = partial(cluster.get_all, "events", namespace)
    wait_for(events, lambda found: any(MISPLACED in event["message"] for event in found), "the scheduler's event")
    cluster.shown_logs.add("kube-scheduler")

    with pytest.raises(RuntimeError, match="timed out waiting for the condition") as caught:
        cluster.wait("pod/web", "condition=Ready", namespace, timeout_seconds=1)
    told = str(caught.value)
    values = {"cluster": cluster, "namespace": namespace}
    plain = report_of_failure(SimpleNamespace(funcargs=values), "assert 1 == 2")
    waited = report_of_failure(SimpleNamespace(funcargs=values), told)
    elsewhere = report_of_failure(SimpleNamespace(funcargs={}), "assert 1 == 2")
    cluster.shown_logs.remove("kube-scheduler")

    assert f"{namespace}/web, Pending, no node, " in told
    assert "--- kubectl describe pod/web:" in told
    assert "--- end of the log of kube-scheduler:" in told
    assert told.count(MISPLACED) >= 3  # the line of the pod, the event, the description
    [(_, shown)] = plain.sections
    assert HEADING in shown
    assert MISPLACED in shown
    assert waited.sections == elsewhere.sections == []
