"""An ask made definite: how many devices, and what of each."""

from dataclasses import dataclass

from aimgpu.domain import LEAST_LEVEL, Ask, Auto, Fraction, IsolationRequirement, Level, Memory, PartitionKind, Whole
from aimgpu.errors import InvalidInput
from aimgpu.units import PPM


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an ask comes to. `exclusive` needs take whole partitions, whatever the bytes."""

    ask: Ask
    count: int  # devices, all of one node
    exclusive: bool
    whole: bool
    kind: str | None
    least_level: Level
    memory_bytes: int | None  # None: depends on the device (a fraction) or is the whole partition
    avoided: frozenset[str]  # deployments that it avoids, and that avoid it
    products: frozenset[str]  # folded, as `refused_products`
    refused_products: frozenset[str]

    @property
    def whole_devices(self) -> int:
        """Compared with what a node is reserved for; 0 for a share of one device."""
        return self.count if self.whole or self.count > 1 else 0

    def bytes_on(self, device_bytes: int) -> int:
        """Bytes that must be free on one partition of a device of this size; a share has at least one."""
        if isinstance(self.ask.want, Fraction):
            return max(device_bytes * self.ask.want.ppm // PPM, 1)
        return max(self.memory_bytes or 0, 1)


def resolve_need(ask: Ask, avoided_by: frozenset[str] = frozenset()) -> Need:
    """Raises InvalidInput where the ask cannot be meant. `avoided_by` are deployments that do not want to be beside it."""
    _check(ask)
    want = ask.want
    memory_bytes = want.memory_bytes if isinstance(want, Memory) else ask.footprint_bytes
    whole = isinstance(want, Whole)
    return Need(
        ask=ask,
        count=want.count if isinstance(want, Whole) and want.count > 1 else ask.devices,
        exclusive=whole or isinstance(want, PartitionKind) or ask.isolation is IsolationRequirement.HARDWARE,
        whole=whole,
        kind=want.kind.lower() if isinstance(want, PartitionKind) else None,
        least_level=LEAST_LEVEL[ask.isolation],
        memory_bytes=memory_bytes,
        avoided=ask.not_with_deployments | avoided_by,
        products=frozenset(product.casefold() for product in ask.products),
        refused_products=frozenset(product.casefold() for product in ask.refused_products),
    )


def _check(ask: Ask) -> None:
    want = ask.want
    if ask.devices < 0 or (isinstance(want, Whole) and want.count < 1):
        raise InvalidInput(f"{ask.name} requests a negative number of GPUs", hint="Request 1 or more.")
    if isinstance(want, Whole) and want.count > 1 and ask.devices not in (1, want.count):
        raise InvalidInput(f"{ask.name} requests {want.count} whole GPUs and also {ask.devices}", hint="Give one number.")
    if isinstance(want, Auto) and ask.footprint_bytes is None:
        raise InvalidInput(
            f"{ask.name} is to be sized, but its memory footprint is not known",
            hint="Give its memory (gpu: {memory: 24GiB}) or a model that can be sized.",
        )
    if ask.compute_ppm is not None and not 0 < ask.compute_ppm <= PPM:
        raise InvalidInput(f"{ask.name} requests {ask.compute_ppm} millionths of the compute", hint="1 to 1000000.")
    _check_bytes(ask)


def _check_bytes(ask: Ask) -> None:
    want, footprint = ask.want, ask.footprint_bytes
    if isinstance(want, Fraction) and not 0 < want.ppm <= PPM:
        raise InvalidInput(f"{ask.name} requests {want.ppm} millionths of a GPU", hint="1 to 1000000.")
    if isinstance(want, Memory) and want.memory_bytes < 1:
        raise InvalidInput(f"{ask.name} requests {want.memory_bytes} bytes of memory", hint="Request at least 1 byte.")
    if footprint is not None and footprint < 0:
        raise InvalidInput(f"the footprint of {ask.name} is {footprint} bytes", hint="A footprint is not negative.")
    if ask.cpu_millis < 0 or ask.host_memory_bytes < 0:
        raise InvalidInput(f"{ask.name} requests negative CPU or host memory", hint="Request 0 or more.")
