"""Who holds a simulated device: live processes that say so in their environment, so nothing can go stale."""

from dataclasses import dataclass
from pathlib import Path

DEVICE_VARIABLE = "AIM_SIMULATED_DEVICE"
SCOPE_VARIABLE = "AIM_SIMULATED_SCOPE"  # distinguishes simulated machines on one host
PARTITION_VARIABLE = "AIM_PARTITION_STABLE_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live process that was started on a simulated GPU."""

    pid: int
    name: str | None
    device_id: str
    partition_id: str | None


def find_holders(scope: str, proc: Path = Path("/proc")) -> tuple[Holder, ...]:
    """Processes started with the environment that `identify` gave; those of another user cannot be seen."""
    found = (_read_holder(entry, scope) for entry in proc.iterdir() if entry.name.isdecimal())
    return tuple(sorted((holder for holder in found if holder is not None), key=lambda holder: holder.pid))


def _read_holder(process: Path, scope: str) -> Holder | None:
    try:
        raw = (process / "environ").read_bytes()
        if DEVICE_VARIABLE.encode() not in raw:
            return None
        name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # gone, or someone else's
        return None
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    environment = {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}
    device = environment.get(DEVICE_VARIABLE)
    if device is None or environment.get(SCOPE_VARIABLE, scope) != scope:
        return None
    return Holder(pid=int(process.name), name=name or None, device_id=device, partition_id=environment.get(PARTITION_VARIABLE))
