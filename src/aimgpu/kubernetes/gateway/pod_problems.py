"""Why the pods of a model do not start, as Kubernetes reports it. No I/O."""

from dataclasses import dataclass

from aimgpu.kubernetes.api_client import Object
from aimgpu.kubernetes.gateway.served_models import ModelKey, model_key
from aimgpu.kubernetes.serving.model_status import pod_state


@dataclass(frozen=True, slots=True)
class _Pod:
    model: ModelKey
    problem: str | None


class PodProblems:
    """Follows pods. One that failed counts as failing until it is ready: a container in a crash loop runs in between."""

    def __init__(self) -> None:
        self._pods: dict[tuple[str, str], _Pod] = {}

    def put(self, pod: Object) -> None:
        """As it is now."""
        state, reason = pod_state(pod, with_log=False)  # what an engine printed is not for callers
        place = _place(pod)
        if state == "draining":
            self._pods.pop(place, None)
            return
        before = self._pods.get(place)
        problem = f"{place[1]}: {reason or 'it failed'}" if state == "failed" else None
        if state not in ("failed", "ready") and before is not None:
            problem = before.problem
        self._pods[place] = _Pod(model_key(pod), problem)

    def remove(self, pod: Object) -> None:
        """It is gone."""
        self._pods.pop(_place(pod), None)

    def of(self, model: ModelKey) -> str | None:
        """Of one of its pods, where all of them fail; None while one may still become ready."""
        found = [pod.problem for pod in self._pods.values() if pod.model == model]
        return found[0] if found and all(found) else None


def _place(pod: Object) -> tuple[str, str]:
    return str(pod["metadata"]["namespace"]), str(pod["metadata"]["name"])
