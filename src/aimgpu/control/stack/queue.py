"""What a stack file says under `queue`."""

from collections.abc import Callable

from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import ByClass, Priority, QueueSettings
from aimgpu.units import parse_duration_ms

QUEUE_KEYS = ("per_gpu", "longest_wait", "most_queued")
_DEFAULT = "default"
_MOST_PER_GPU = 100_000
_MOST_QUEUED = 1_000_000
_LONGEST_WAIT_MS = 24 * 3600 * 1000
_EXAMPLE = "queue: {per_gpu: 64, longest_wait: {low: 2m}}"


def read_queue(node: YamlNode | None) -> QueueSettings | None:
    """None: nothing was said, and what holds goes on to hold."""
    if node is None:
        return None
    if not node.is_mapping:
        node.choice((_DEFAULT,))
        return QueueSettings()
    fields = node.fields(QUEUE_KEYS)
    if not fields:
        raise node.complaint("'queue' is empty", f"For example: {_EXAMPLE}; `queue: {_DEFAULT}` puts the defaults back.")
    per_gpu = fields["per_gpu"].whole_number(most=_MOST_PER_GPU, example="64") if "per_gpu" in fields else None
    return QueueSettings(
        per_gpu=per_gpu,
        longest_wait_ms=_by_class(fields.get("longest_wait"), _wait_ms),
        most_queued=_by_class(fields.get("most_queued"), lambda one: one.whole_number(most=_MOST_QUEUED, example="1000")),
    )


def _by_class(node: YamlNode | None, read: Callable[[YamlNode], int]) -> ByClass:
    """One value for all, or one for each class that is named."""
    if node is None:
        return ByClass()
    if not node.is_mapping:
        value = read(node)
        return ByClass(high=value, medium=value, low=value)
    fields = node.fields([priority.value for priority in Priority])
    if not fields:
        raise node.complaint(f"{node.key!r} is empty", "Name high, medium or low, or give one value for all.")
    return ByClass(**{name: read(one) for name, one in fields.items()})


def _wait_ms(node: YamlNode) -> int:
    milliseconds = node.quantity(parse_duration_ms, "30s")
    if milliseconds > _LONGEST_WAIT_MS:
        raise node.complaint(f"{node.key!r} is longer than a day", "A request waits at most 24h.")
    return milliseconds
