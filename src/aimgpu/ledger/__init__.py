"""What was wanted and what was granted, on disk (SQLite), crash-safe.

Start at `Ledger.open`. The ledger holds the intent before the act, one owner a machine. Not here: deciding, starting, reading
hardware.
"""

from aimgpu.ledger.owner import Owner
from aimgpu.ledger.store import Ledger, Operation, read_grants

__all__ = ["Ledger", "Operation", "Owner", "read_grants"]
