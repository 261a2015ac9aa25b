"""What a recording of real GPUs proves, in words that fit every vendor. Recorders live with their backends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDevice:
    """One kind of GPU that was seen. `layouts` are its modes or partition kinds, as the device reported them."""

    product: str
    market_name: str
    driver: str
    memory_bytes: int
    layouts: tuple[str, ...]
