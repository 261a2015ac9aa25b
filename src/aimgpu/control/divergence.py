"""Deployments that run otherwise than wanted though nothing of them failed: left so by an operation given up. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from aimgpu.control.planning.prepared import revision_of
from aimgpu.domain import Deployment, Instance, InstanceState

_SETTLED = frozenset({InstanceState.READY, InstanceState.SLEEPING, InstanceState.FAILED})
_UNDER_WAY = frozenset({InstanceState.QUEUED, InstanceState.LOADING, InstanceState.DRAINING})


def find_diverged(deployments: Iterable[Deployment], instances: Iterable[Instance]) -> dict[str, tuple[str, ...]]:
    """By name, the instances that it has; a deployment of which something is being started or ended is left out.

    A replica is missing, stands twice, or is of an earlier revision. Those that failed have pauses of their own.
    """
    by_name: dict[str, list[Instance]] = {}
    for instance in instances:
        by_name.setdefault(instance.deployment, []).append(instance)
    return {
        deployment.name: tuple(one.id for one in by_name.get(deployment.name, ()))
        for deployment in deployments
        if _is_diverged(deployment, by_name.get(deployment.name, []))
    }


def find_abandoned(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Those that are being started or ended; where no operation is under way, nothing waits for them."""
    return tuple(one for one in instances if one.state in _UNDER_WAY)


def still_diverged(before: Mapping[str, tuple[str, ...]], now: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Those that were so at the last look, with the same instances: nothing works on them."""
    return [name for name, instances in now.items() if before.get(name) == instances]


def _is_diverged(deployment: Deployment, instances: Sequence[Instance]) -> bool:
    if any(one.state not in _SETTLED for one in instances):
        return False
    replicas = Counter(one.replica for one in instances)
    if set(replicas) != set(range(deployment.replicas)) or max(replicas.values(), default=1) > 1:
        return True
    ready = [one.revision for one in instances if one.state is InstanceState.READY and one.revision is not None]
    return bool(ready) and any(revision != revision_of(deployment) for revision in ready)
