"""The pods of models: why they do not start, and how long a start takes, as Kubernetes reports it. No I/O."""

import datetime as dt
from dataclasses import dataclass

from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.models.gateway.served_models import ModelKey, model_key
from aimgpu.kubernetes.models.serving.model_status import pod_state


@dataclass(frozen=True, slots=True)
class _Pod:
    model: ModelKey
    problem: str | None  # why it fails
    no_room: str | None  # why no node takes it
    started: dt.datetime | None  # its containers run since then
    ready: bool


class ModelPods:
    """Follows pods. One that failed counts as failing until it is ready: a container in a crash loop runs in between."""

    def __init__(self) -> None:
        self._pods: dict[tuple[str, str], _Pod] = {}
        # From the start of the containers until they were ready: neither waiting for a GPU nor pulling an image is in it. The
        # shortest that was seen: a start that downloads a model says nothing about the next one.
        self.start_seconds: dict[ModelKey, float] = {}

    def put(self, pod: Object) -> None:
        """As it is now."""
        state, reason = pod_state(pod, with_log=False)  # what an engine printed is not for callers
        place, model = _place(pod), model_key(pod)
        if state == "draining":
            self._pods.pop(place, None)
            return
        before = self._pods.get(place)
        problem = f"{place[1]}: {reason or 'it failed'}" if state == "failed" else None
        if state not in ("failed", "ready") and before is not None:
            problem = before.problem
        ready, started = _condition(pod, "Ready"), _started(pod)
        is_ready = ready.get("status") == "True"
        if is_ready and before is not None and not before.ready and started is not None and before.started == started:
            seconds = (dt.datetime.fromisoformat(str(ready["lastTransitionTime"])) - started).total_seconds()
            self.start_seconds[model] = min(seconds, self.start_seconds.get(model, seconds))
        scheduled = _condition(pod, "PodScheduled")
        unplaced = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
        self._pods[place] = _Pod(model, problem, str(scheduled.get("message")) if unplaced else None, started, is_ready)

    def remove(self, pod: Object) -> None:
        """It is gone."""
        self._pods.pop(_place(pod), None)

    def problem_of(self, model: ModelKey) -> str | None:
        """Of one of its pods, where all of them fail; None while one may still become ready."""
        found = [pod.problem for pod in self._of(model)]
        return found[0] if found and all(found) else None

    def no_room_of(self, model: ModelKey) -> str | None:
        """What kube-scheduler says of one of its pods, where it found a node for none of them."""
        found = [pod.no_room for pod in self._of(model)]
        return found[0] if found and all(found) else None

    def is_starting(self, model: ModelKey) -> bool:
        """Whether the containers of one of its pods run."""
        return any(pod.started is not None for pod in self._of(model))

    def _of(self, model: ModelKey) -> list[_Pod]:
        return [pod for pod in self._pods.values() if pod.model == model]


def _condition(pod: Object, name: str) -> Object:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == name), {})


def _started(pod: Object) -> dt.datetime | None:
    """When the last of its containers started; None: one of them does not run."""
    states = [each.get("state") or {} for each in (pod.get("status") or {}).get("containerStatuses") or ()]
    times = [(state.get("running") or {}).get("startedAt") for state in states]
    return max(dt.datetime.fromisoformat(str(time)) for time in times) if times and all(times) else None


def _place(pod: Object) -> tuple[str, str]:
    return str(pod["metadata"]["namespace"]), str(pod["metadata"]["name"])
