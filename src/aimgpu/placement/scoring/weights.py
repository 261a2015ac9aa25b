"""How much each concern counts when two places would both do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parts of the score, in devices lost. Set on seeds that no reported figure uses; the figures are flat around them."""

    tight: float = 0.1  # per device of room left on the partition
    waste: float = 0.1  # per device that the mean ask could no longer use
    strand: float = 0.3  # per device without the CPU to go with it
    host: float = 0.3  # per device without the host memory to go with it
    spare: float = 0.15  # per 10 cores without a device to go with them
    fit: float = 0.01  # per 8 devices, 128 cores and 512 GiB of host memory left on the node: fuller nodes first
    scarce: float = 0.3  # per device of a product that asks name as much as there is stock


COMING_AND_GOING = Weights()
FILLING_UP = Weights(tight=0.02, waste=0.03)  # nothing ever leaves: leftovers matter less than the last pairing
