"""Which scheduler grants a GPU: one at a time, whatever partitioner it has, and no layout changes under its models."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from aimgpu.errors import LedgerOwned, PartitionBusy
from aimgpu.home import Home
from aimgpu.ledger import Owner


class ClaimHolder(Protocol):
    """A scheduler, as a partitioner knows it."""

    def model_ids(self) -> tuple[str, ...]:
        """The models that have memory of the GPU."""


class GpuClaim:
    """One per GPU, shared by its partitioners. With a `home` it takes the daemon's lock there: one of the two grants."""

    def __init__(self, home: Home | None) -> None:
        self.lock = threading.RLock()
        self._home = home
        self._holder: weakref.ref[ClaimHolder] | None = None
        self._release: weakref.finalize[[Path], ClaimHolder] | None = None

    def take(self, holder: ClaimHolder) -> None:
        """Raises LedgerOwned while another scheduler, or the daemon, has it."""
        with self.lock:
            if self.holder not in (None, holder):
                raise LedgerOwned("another scheduler grants this GPU", hint="Use that one, or close() it first.")
            if self._home is not None and self.holder is None:
                _hold(self._home.path)
                self._release = weakref.finalize(holder, _let_go, self._home.path)
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

    @contextmanager
    def change(self, device_id: str) -> Iterator[None]:
        """While the layout is changed: no other scheduler and no daemon grants the GPU.

        Raises PartitionBusy while models are scheduled, whose memory is accounted for by the layout that is there, and
        LedgerOwned while the daemon, or a scheduler in another process, has the GPUs of this machine.
        """
        with self.lock:
            models = self.holder.model_ids() if self.holder is not None else ()
            if models:
                hint = "Call unschedule_model() for each of them first."
                raise PartitionBusy(f"{device_id} has scheduled models: {', '.join(models)}", hint=hint)
            if self._home is None:
                yield
                return
            _hold(self._home.path)
            try:
                yield
            finally:
                _let_go(self._home.path)


def simulated_claim(gpu_id: int) -> GpuClaim:
    """The claim of a simulated GPU, which is known by its number and exists in this process only."""
    return _claim(None, gpu_id)


def real_claim(home: Home, gpu_id: int) -> GpuClaim:
    """The claim of a GPU of this machine."""
    return _claim(home, gpu_id)


_GUARD = threading.RLock()  # a scheduler may be collected, and let go, while this thread has it
_CLAIMS: weakref.WeakValueDictionary[tuple[Path | None, int], GpuClaim] = weakref.WeakValueDictionary()
_OWNED: dict[Path, tuple[Owner, int]] = {}  # the lock of a home, and for how many GPUs this process has it


def _claim(home: Home | None, gpu_id: int) -> GpuClaim:
    with _GUARD:
        key = (None if home is None else home.path, gpu_id)
        claim = _CLAIMS.get(key)
        if claim is None:
            claim = _CLAIMS[key] = GpuClaim(home)
        return claim


def _hold(path: Path) -> None:
    with _GUARD:
        owner, count = _OWNED.get(path) or (_acquire(path), 0)
        _OWNED[path] = (owner, count + 1)


def _let_go(path: Path) -> None:
    with _GUARD:
        owner, count = _OWNED.pop(path)
        if count > 1:
            _OWNED[path] = (owner, count - 1)
        else:
            owner.release()


def _acquire(path: Path) -> Owner:
    try:
        return Owner.acquire(path)
    except LedgerOwned as error:
        raise LedgerOwned(error.message, hint="Close the other scheduler, or stop the daemon with `aimgpu down`.") from error
