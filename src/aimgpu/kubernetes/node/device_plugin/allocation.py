"""Which replicas a container should get. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from aimgpu.domain import Spread
from aimgpu.errors import Conflict, InvalidInput
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, PluginReplica
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig


def choose_replicas(
    resource: NodeResource, available: Sequence[str], required: Sequence[str], count: int, config: SharingConfig
) -> list[str]:
    """Packed: GPUs that are used most first; spread: those that are used least. Different GPUs before the same twice."""
    by_id = {replica.id: replica for replica in resource.replicas}
    free = Counter(by_id[name].partition_id for name in available if name in by_id)
    total = Counter(replica.partition_id for replica in resource.replicas)
    used = {name: total[name] - free[name] for name in total}
    chosen = [name for name in required if name in by_id]
    own = Counter(by_id[name].partition_id for name in chosen)
    sign = -1 if config.placement is Spread.PACK else 1
    left = [name for name in available if name in by_id and name not in chosen]
    while left and len(chosen) < count:
        best = min(left, key=lambda name: _rank(by_id[name], own, used, sign))
        chosen.append(best)
        own[by_id[best].partition_id] += 1
        left.remove(best)
    return chosen


def check_request(resource: NodeResource, wanted: Sequence[str], config: SharingConfig) -> list[PluginReplica]:
    """What a container is to get. Raises InvalidInput or Conflict with the text that its pod fails with."""
    by_id = {replica.id: replica for replica in resource.replicas}
    unknown = [name for name in wanted if name not in by_id]
    if unknown:
        raise Conflict(f"{resource.name} has no device {unknown[0]} any more")
    if resource.shared and len(wanted) > 1 and config.fail_requests_greater_than_one:
        raise InvalidInput(
            f"request for '{resource.name}: {len(wanted)}' too large: maximum request size for shared resources is 1"
        )
    replicas = [by_id[name] for name in wanted]
    twice = _most(replica.partition_id for replica in replicas)
    if twice > 1 and not config.same_gpu:
        raise InvalidInput(
            f"{twice} replicas of one GPU would go to one container, which gives it no more of the GPU",
            hint="Request 1, or set aim.sameGpu: true to add their memory up.",
        )
    return replicas


def _rank(replica: PluginReplica, own: Counter[str], used: dict[str, int], sign: int) -> tuple[int, int, str]:
    return own[replica.partition_id], sign * used[replica.partition_id], replica.id


def _most(names: Iterable[str]) -> int:
    return max(Counter(names).values(), default=0)
