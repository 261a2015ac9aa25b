"""What was wanted and what was granted, on disk (SQLite), crash-safe.

Start at `Ledger.open`. The ledger holds the intent before the act, one owner per machine. Not here: deciding, starting, reading
hardware.
"""

from aimgpu.ledger.file import has_other_schema, move_aside, read_grants
from aimgpu.ledger.owner import Owner
from aimgpu.ledger.state import Retry
from aimgpu.ledger.store import Ledger, OpenOperation

__all__ = ["Ledger", "OpenOperation", "Owner", "Retry", "has_other_schema", "move_aside", "read_grants"]
