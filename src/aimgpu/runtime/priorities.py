"""Priorities as scripts give them: a name, or a number from 1 to 10."""

from aimgpu.domain import Priority
from aimgpu.errors import InvalidInput
from aimgpu.runtime.sizing import shown

LEAST, MOST = 1, 10
_FIRST_MEDIUM, _FIRST_HIGH = 4, 8


def parse_priority(priority: Priority | str | int) -> Priority:
    """`low` (1 to 3), `medium` (4 to 7) or `high` (8 to 10), in any case. Raises InvalidInput for anything else."""
    if isinstance(priority, int) and not isinstance(priority, bool):
        if LEAST <= priority <= MOST:
            return Priority.HIGH if priority >= _FIRST_HIGH else Priority.MEDIUM if priority >= _FIRST_MEDIUM else Priority.LOW
    elif isinstance(priority, str) and priority.lower() in set(Priority):
        return Priority(priority.lower())
    raise InvalidInput(f"{shown(priority)} is not a priority", hint="Use 'low', 'medium' or 'high', or a number from 1 to 10.")
