"""What was wanted and what was granted, on disk (SQLite), crash-safe.

Start at `Ledger.open`. The ledger holds the intent before the act, one owner per machine. Not here: deciding, starting, reading
hardware.
"""

from aimgpu.ledger.file import read_grants
from aimgpu.ledger.mirror import Retry
from aimgpu.ledger.owner import Owner
from aimgpu.ledger.store import Ledger, OpenOperation

__all__ = ["Ledger", "OpenOperation", "Owner", "Retry", "read_grants"]
