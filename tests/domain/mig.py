"""The MIG profiles of an H200, as the driver reports them."""

from aimgpu.domain import SliceProfile
from aimgpu.units import GIB

# kind: compute slices, memory slices, starts, at most
_H200: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "1g.18gb": (1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
    "1g.18gb+me": (1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    "1g.35gb": (1, 2, (0, 2, 4, 6), 4),
    "2g.35gb": (2, 2, (0, 2, 4), 3),
    "3g.71gb": (3, 4, (0, 4), 2),
    "4g.71gb": (4, 4, (0,), 1),
    "7g.141gb": (7, 8, (0,), 1),
}
PROFILES = tuple(
    SliceProfile(
        kind=kind,
        compute_slices=compute,
        memory_slices=memory,
        starts=starts,
        at_most=most,
        memory_bytes=memory * 17 * GIB,
        compute_units=compute * 16,
    )
    for kind, (compute, memory, starts, most) in _H200.items()
)
