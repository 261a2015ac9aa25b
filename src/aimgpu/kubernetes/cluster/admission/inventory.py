"""Which GPUs the cluster has, as far as a fraction of one needs to know: products and the memory of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.domain import Vendor
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.vocabulary import names


@dataclass(frozen=True, slots=True, order=True)
class ProductMemory:
    """A GPU model and the bytes that can be shared of one, or of one partition of the kind asked for."""

    product: str
    memory_bytes: int


def shared_products(
    slices: Iterable[Mapping[str, Any]], *, compute_mode: str | None = None, memory_mode: str | None = None, kai: bool = False
) -> tuple[ProductMemory, ...]:
    """Without modes: whole GPUs that are shared as they are now. With modes: partitions that exist or can be made.

    `kai`: GPUs of the nodes where KAI-Scheduler places.
    """
    wanted = (names.TYPE_SEAT,) if kai else (names.TYPE_SHARED, names.TYPE_DIVISIBLE)
    found = set()
    for item in slices:
        spec = item.get("spec") or {}
        if spec.get("driver") != names.DRIVER:
            continue
        for device in spec.get("devices") or ():
            if _text(device, names.TYPE) not in wanted:
                continue
            if (memory := _shared_memory(device, compute_mode, memory_mode)) is not None:
                found.add(ProductMemory(_text(device, "productName"), memory))
    return tuple(sorted(found))


class PublishedGpus:
    """The ResourceSlices of the cluster. What a pod needs of them is computed when they change, not for every pod."""

    def __init__(self, slices: Iterable[Mapping[str, Any]] = ()) -> None:
        self._specs: dict[str, Mapping[str, Any]] = {}
        self._vendor: Vendor | None = None
        self._found: dict[tuple[str | None, str | None, bool], tuple[ProductMemory, ...]] = {}
        for item in slices:
            self.put(item)

    def put(self, item: Mapping[str, Any]) -> None:
        name, spec = str(item["metadata"]["name"]), item.get("spec") or {}
        if self._specs.get(name) != spec:
            self._specs[name] = spec
            self._forget()

    def remove(self, item: Mapping[str, Any]) -> None:
        if self._specs.pop(str(item["metadata"]["name"]), None) is not None:
            self._forget()

    @property
    def published(self) -> bool:
        """Whether any node has the DRA driver and a GPU."""
        return any(spec.get("devices") for spec in self._specs.values())

    def _forget(self) -> None:
        self._found.clear()
        self._vendor = None

    def shared_products(self, compute_mode: str | None, memory_mode: str | None, *, kai: bool) -> tuple[ProductMemory, ...]:
        key = compute_mode, memory_mode, kai
        if key not in self._found:
            slices = [{"spec": spec} for spec in self._specs.values()]
            self._found[key] = shared_products(slices, compute_mode=compute_mode, memory_mode=memory_mode, kai=kai)
        return self._found[key]

    def vendor(self) -> Vendor:
        """Whose GPUs a model is sized for: where both are published, AMD's, on which it needs more."""
        if self._vendor is None:
            devices = [device for spec in self._specs.values() for device in spec.get("devices") or ()]
            amd = any(_text(device, "vendor") == Vendor.AMD.value for device in devices)
            self._vendor = Vendor.AMD if amd else Vendor.NVIDIA
        return self._vendor


def _shared_memory(device: Mapping[str, Any], compute_mode: str | None, memory_mode: str | None) -> int | None:
    partitioned = bool(_value(device, "partitioned"))
    if compute_mode is None and memory_mode is None:
        if not _value(device, "current"):
            return None
    elif not partitioned and compute_mode not in (None, "SPX"):
        return None
    if compute_mode is not None and _text(device, "computeMode") != compute_mode:
        return None
    if memory_mode is not None and _text(device, "memoryMode") != memory_mode:
        return None
    return parse_quantity((device.get("capacity") or {})[names.MEMORY]["value"])


def _value(device: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - an attribute has one of four types
    attribute = (device.get("attributes") or {}).get(name) or {}
    return next(iter(attribute.values()), None)


def _text(device: Mapping[str, Any], name: str) -> str:
    return str(_value(device, name) or "")
