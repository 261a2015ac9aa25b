"""How much each concern counts when two places would both do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parts of the score, in Devices lost. Set on seeds that no reported figure uses; the figures are flat around them."""

    tight: float = 0.1  # per Device of room left on the Partition
    waste: float = 0.1  # per Device that the mean Ask could no longer use
    strand: float = 0.3  # per Device without the CPU to go with it
    host: float = 0.3  # per Device without the host memory to go with it
    spare: float = 0.15  # per 10 cores without a Device to go with them
    fit: float = 0.01  # per 8 Devices, 128 cores and 512 GiB of host memory left on the node: fuller nodes first
    scarce: float = 0.3  # per device of a product that asks name as much as there is stock


COMING_AND_GOING = Weights()
FILLING_UP = Weights(tight=0.02, waste=0.03)  # nothing ever leaves: leftovers matter less than the last pairing
