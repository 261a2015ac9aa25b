"""A lower bound on late requests that holds for any rule, also one that knows the future and wakes ahead.

Time is cut into windows. What serves a request of a window in time is awake at some moment of the window or of the two
seconds after it. It held its place on the GPU when the window began, which the GPU bounds, or was brought within it, which
link and disk bound: each brings one after the other, none quicker for its bytes than the quickest shape. The bytes of all
that serve are at most both together. Which requests are given up is left to the best choice, in fractions of models: the most
requests for their bytes are served first. The most that any of several lengths of windows shows is the bound. Starts,
prefill, falling asleep and work that keeps a model awake are left out, in favour of the rule.
"""

from collections import Counter
from collections.abc import Sequence

from aimgpu.placement.residency import MemoryRoom
from aimgpu.placement.residency_replay import ModelShape, Request

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def least_late(shapes: Sequence[ModelShape], requests: Sequence[Request], room: MemoryRoom) -> float:
    """Requests."""
    return max((_with_windows(shapes, requests, room, length) for length in LENGTHS), default=0.0)


def _with_windows(shapes: Sequence[ModelShape], requests: Sequence[Request], room: MemoryRoom, length: float) -> float:
    size = {shape.name: shape.awake_bytes - shape.asleep_bytes for shape in shapes}
    slack = max(shape.first_token_seconds for shape in shapes)
    quickest = max(size[shape.name] / shape.wake_seconds for shape in shapes)
    quickest += max(size[shape.name] / shape.reload_seconds if shape.reload_seconds else 0.0 for shape in shapes)
    # A sleeper that was stopped frees what it held: all of the GPU counts, and no remains are taken off.
    takes = room.gpu_bytes + quickest * (length + slack)
    windows: dict[int, Counter[str]] = {}
    for request in requests:
        windows.setdefault(int(request.at // length), Counter())[request.model] += 1
    return sum(_given_up(counts, size, takes) for counts in windows.values())


def _given_up(counts: Counter[str], size: dict[str, int], takes: float) -> float:
    left, late = takes, 0.0
    for name, count in sorted(counts.items(), key=lambda item: -item[1] / size[item[0]]):
        part = min(1.0, left / size[name])
        left -= part * size[name]
        late += count * (1 - part)
    return late
