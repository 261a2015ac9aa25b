"""One tree of errors, each with a stable code, a hint, an exit status and an HTTP status.

AimGpuError
├── InvalidInput              what was given cannot be meant
│   ├── InvalidQuantity
│   ├── InvalidLayout
│   ├── InvalidStackFile
│   ├── InvalidModelFile
│   ├── UnknownProduct
│   ├── UnknownLayout
│   └── UnknownModel
├── NotFound                  names something that is not there
│   ├── UnknownDeployment
│   ├── UnknownDevice
│   └── UnknownPartition
├── NotAllowed                no permission, or no key
├── PlacementRefused          a refusal, where the caller needs an exception
├── Conflict                  true, but not now
│   ├── NotInitialized
│   ├── LedgerOwned
│   ├── PartitionBusy
│   ├── ShareInUse
│   └── DaemonRunning
├── HardwareFailed            the device or its tools did not do it
│   ├── HardwareUnavailable
│   │   └── PartitionGone
│   ├── LayoutNotApplied
│   ├── DriverReloadNeeded
│   └── RegionUnusable
├── EngineFailed              an engine did not start, or died
│   ├── EngineUnavailable
│   ├── EngineDisconnected
│   ├── EngineUnreachable
│   ├── StrangerListens
│   ├── EngineTimedOut
│   └── ModelUnavailable
├── LedgerFailed              the ledger cannot be written or read
│   ├── LedgerFull
│   ├── LedgerCorrupt
│   └── OtherLedgerSchema
├── RequestRefused            the gateway's answer to a request that it does not pass on
│   ├── InvalidRequest
│   ├── NoSuchPath
│   ├── MethodNotAllowed
│   ├── RequestTimedOut
│   ├── BodyTooLarge
│   ├── UnsupportedMediaType
│   ├── NotAuthenticated
│   ├── ModelForbidden
│   ├── ModelNotFound
│   ├── ModelNotReady
│   ├── QueueFull
│   ├── RateExceeded
│   ├── LoadShed
│   ├── RequestQuarantined
│   └── DeadlinePassed
├── ClusterFailed             the Kubernetes API refused a request, or cannot be reached
│   ├── NotFoundInCluster
│   └── ClusterConflict
└── DaemonUnreachable
"""

import errno
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import partial
from heapq import nlargest
from itertools import takewhile
from typing import ClassVar, Self

_LONGEST_NAME = 100
_LONGEST_COMPARED = 64
_MOST_COMPARED = 20
_MOST_LISTED = 50


def suggest_nearest(names: Iterable[str], known: Iterable[str]) -> str:
    """A question with the known names that come nearest to these, and a space after it; empty where none comes near.

    Case does not count. Of many names only those are compared that begin most alike: comparing takes up to a millisecond each.
    """
    folded = {one.casefold(): one for one in known}
    near: dict[str, None] = {}
    for name in names:
        given = name[:_LONGEST_COMPARED].casefold()
        some = nlargest(_MOST_COMPARED, folded, key=partial(_count_alike, given))
        near |= dict.fromkeys(folded[match] for match in get_close_matches(given, some, n=1))
    return f"Did you mean {', '.join(map(repr, near))}? " if near else ""


def _count_alike(one: str, other: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class AimGpuError(Exception):
    """Base of everything this package raises on purpose. `hint` says what to do; `page_hint` what to do on the page instead."""

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None, page_hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.page_hint = page_hint

    def to_json(self) -> dict[str, str | None]:
        found = {"code": self.code, "message": self.message, "hint": self.hint}
        return found if self.page_hint is None else {**found, "page_hint": self.page_hint}


class InvalidInput(AimGpuError, ValueError):
    """`typed` is the word that is wrong, `near` what may be meant by it."""

    code = "invalid_input"
    exit_status = 2
    http_status = 400

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        page_hint: str | None = None,
        typed: str | None = None,
        near: Iterable[str] = (),
    ) -> None:
        super().__init__(message, hint=hint, page_hint=page_hint)
        self.typed = typed
        self.near = tuple(near)


class InvalidQuantity(InvalidInput):
    code = "invalid_quantity"


class InvalidLayout(InvalidInput):
    code = "invalid_layout"


class InvalidStackFile(InvalidInput):
    code = "invalid_stack_file"


class InvalidModelFile(InvalidInput):
    code = "invalid_model_file"


class UnknownProduct(InvalidInput):
    code = "unknown_product"


class UnknownLayout(InvalidInput):
    code = "unknown_layout"


class UnknownModel(InvalidInput):
    code = "unknown_model"
    http_status = 404


class NotFound(AimGpuError):
    code = "not_found"
    exit_status = 4
    http_status = 404


class UnknownDeployment(NotFound):
    code = "unknown_deployment"

    @classmethod
    def of(cls, *names: str, known: Iterable[str], where: str = "") -> Self:
        """With the nearest name that is known, and all of them. `where` is the end of the sentence, such as " in default"."""
        listed = sorted(set(known))
        quoted = ", ".join(repr(name[:_LONGEST_NAME]) for name in names)
        question = suggest_nearest(names, listed)
        more = f" and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
        hint = f"{question}Deployed: {', '.join(listed[:_MOST_LISTED]) or 'none'}{more}."
        return cls(f"there is no model {quoted}{where}", hint=hint)


class UnknownDevice(NotFound):
    code = "unknown_device"


class UnknownPartition(NotFound):
    code = "unknown_partition"


class NotAllowed(AimGpuError):
    code = "not_allowed"
    exit_status = 5
    http_status = 403


class PlacementRefused(AimGpuError):
    code = "placement_refused"
    exit_status = 3
    http_status = 409


class Conflict(AimGpuError):
    code = "conflict"
    exit_status = 6
    http_status = 409


class NotInitialized(Conflict):
    code = "not_initialized"


class LedgerOwned(Conflict):
    code = "ledger_owned"


class PartitionBusy(Conflict):
    code = "partition_busy"


class ShareInUse(Conflict):
    code = "share_in_use"


class DaemonRunning(Conflict):
    code = "daemon_running"


class HardwareFailed(AimGpuError):
    code = "hardware_failed"
    exit_status = 7
    http_status = 502


class HardwareUnavailable(HardwareFailed):
    code = "hardware_unavailable"
    http_status = 503


class PartitionGone(HardwareUnavailable):
    """What was allocated is not there any more: another layout, or the GPU is lost. It has to be allocated again."""

    code = "partition_gone"


class LayoutNotApplied(HardwareFailed):
    code = "layout_not_applied"


class DriverReloadNeeded(HardwareFailed):
    code = "driver_reload_needed"
    http_status = 409


class RegionUnusable(HardwareFailed):
    code = "region_unusable"


class EngineFailed(AimGpuError):
    """`port_taken`: another program took its port between our choice and its start, so it is worth another try."""

    port_taken = False
    code = "engine_failed"
    exit_status = 8
    http_status = 502


class EngineUnavailable(EngineFailed):
    code = "engine_unavailable"
    http_status = 503


class EngineDisconnected(EngineFailed):
    code = "engine_disconnected"


class EngineUnreachable(EngineFailed):
    """Nothing of the request reached the engine, so another may be asked."""

    code = "engine_unreachable"


class StrangerListens(EngineFailed):
    """Another program than the engine answers at its address."""

    code = "stranger_listens"


class EngineTimedOut(EngineFailed):
    code = "engine_timed_out"
    http_status = 504


class ModelUnavailable(EngineFailed):
    code = "model_unavailable"
    http_status = 503


class LedgerFailed(AimGpuError):
    code = "ledger_failed"
    exit_status = 9
    http_status = 500


class LedgerFull(LedgerFailed):
    code = "ledger_full"
    http_status = 507


class LedgerCorrupt(LedgerFailed):
    code = "ledger_corrupt"


class OtherLedgerSchema(LedgerFailed):
    code = "other_ledger_schema"


class RequestRefused(AimGpuError):
    """`param` names the field that is wrong; `retry_after_seconds` when asking again may help."""

    code = "request_refused"
    exit_status = 11
    http_status = 400

    def __init__(
        self, message: str, *, hint: str | None = None, param: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(RequestRefused):
    code = "invalid_request"


class NoSuchPath(RequestRefused):
    code = "no_such_path"
    http_status = 404


class MethodNotAllowed(RequestRefused):
    """`allowed` goes into the answer's Allow header."""

    code = "method_not_allowed"
    http_status = 405
    allowed: str | None = None


class RequestTimedOut(RequestRefused):
    code = "request_timed_out"
    http_status = 408


class BodyTooLarge(RequestRefused):
    code = "body_too_large"
    http_status = 413


class UnsupportedMediaType(RequestRefused):
    code = "unsupported_media_type"
    http_status = 415


class NotAuthenticated(RequestRefused):
    code = "invalid_api_key"
    http_status = 401


class ModelForbidden(RequestRefused):
    code = "model_forbidden"
    http_status = 403


class ModelNotFound(RequestRefused):
    code = "model_not_found"
    http_status = 404


class ModelNotReady(RequestRefused):
    code = "model_not_ready"
    http_status = 503


class QueueFull(RequestRefused):
    code = "queue_full"
    http_status = 429


class RateExceeded(RequestRefused):
    code = "rate_exceeded"
    http_status = 429


class LoadShed(RequestRefused):
    code = "load_shed"
    http_status = 503


class RequestQuarantined(RequestRefused):
    """Engines died on this request before."""

    code = "request_quarantined"
    http_status = 422


class DeadlinePassed(RequestRefused):
    code = "deadline_passed"
    http_status = 504


class ClusterFailed(AimGpuError):
    """The Kubernetes API refused a request, or cannot be reached (`status` is None)."""

    code = "cluster_failed"
    http_status = 502

    def __init__(self, message: str, *, hint: str | None = None, status: int | None = None, reason: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason  # the server's, such as "AlreadyExists"


class NotFoundInCluster(ClusterFailed):
    code = "cluster_not_found"
    http_status = 404


class ClusterConflict(ClusterFailed):
    """Another client changed the object meanwhile, or it exists already."""

    code = "cluster_conflict"
    http_status = 409


class DaemonUnreachable(AimGpuError):
    code = "daemon_unreachable"
    exit_status = 10
    http_status = 503


def from_os_error(error: OSError) -> AimGpuError:
    """For the outermost door: a file that cannot be read or written is for the user to fix and gets no traceback."""
    hint = "AIMGPU_HOME and AIMGPU_CACHE choose other folders; `aimgpu doctor` looks at them."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LedgerFull(describe_os_error(error), hint=f"Free disk space. {hint}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotAllowed(describe_os_error(error), hint=hint)
    return AimGpuError(describe_os_error(error), hint=hint)


def describe_os_error(error: OSError) -> str:
    """What the system refused, and for which file where it says so."""
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what


def all_errors(root: type[AimGpuError] = AimGpuError) -> Iterator[type[AimGpuError]]:
    """The tree, parents before children, for the reference page and the exit-code test."""
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)
