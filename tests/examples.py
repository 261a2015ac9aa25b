"""How many made-up examples a property is tried with: by default few and always the same, in `make fuzz` many and new ones."""

import os

TIMES = int(os.environ.get("AIMGPU_FUZZ", "1"))


def examples(count: int) -> int:
    return count * TIMES
