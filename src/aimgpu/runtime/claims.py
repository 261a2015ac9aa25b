"""Which scheduler grants a partitioner's GPU: one at a time, and no layout changes under its models."""

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from aimgpu.errors import LedgerOwned, PartitionBusy
from aimgpu.home import Home
from aimgpu.ledger import Owner


class ClaimHolder(Protocol):
    """A scheduler, as a partitioner knows it."""

    def model_ids(self) -> tuple[str, ...]:
        """The models that have memory of the GPU."""


class GpuClaim:
    """One per partitioner. With a `home` it takes the same lock there as the daemon, so that only one of them grants."""

    def __init__(self, home: Callable[[], Home] | None = None) -> None:
        self.lock = threading.RLock()
        self._home = home
        self._holder: weakref.ref[ClaimHolder] | None = None
        self._release: weakref.finalize[[], ClaimHolder] | None = None

    def take(self, holder: ClaimHolder) -> None:
        """Raises LedgerOwned while another scheduler, or the daemon, has it."""
        with self.lock:
            if self.holder not in (None, holder):
                raise LedgerOwned("another scheduler grants this GPU", hint="Use that one, or close() it first.")
            if self._home is not None and self.holder is None:
                self._release = weakref.finalize(holder, _acquire(self._home()).release)
            self._holder = weakref.ref(holder)

    def give_back(self) -> None:
        """Safe to call twice; a scheduler that nothing refers to any more has given it back by itself."""
        with self.lock:
            self._holder = None
            if self._release is not None:
                self._release()

    @property
    def holder(self) -> ClaimHolder | None:
        """The scheduler that has it now."""
        return None if self._holder is None else self._holder()

    def check_unused(self, device_id: str) -> None:
        """Raises PartitionBusy while models are scheduled: their memory is accounted for by the layout that is there."""
        holder = self.holder
        models = holder.model_ids() if holder is not None else ()
        if models:
            raise PartitionBusy(
                f"{device_id} has scheduled models: {', '.join(models)}", hint="Call unschedule_model() for each of them first."
            )


def _acquire(home: Home) -> Owner:
    try:
        return Owner.acquire(home.path)
    except LedgerOwned as error:
        raise LedgerOwned(error.message, hint="Close the other scheduler, or stop the daemon with `aimgpu down`.") from error
