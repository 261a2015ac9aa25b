"""A simulated MI300X whose measured use a test sets."""

from aimgpu.domain import DeviceUsage
from aimgpu.hardware.simulated import SimulatedHardware


class MeasuredHardware(SimulatedHardware):
    """Reports `usage` where it is set."""

    def __init__(self) -> None:
        super().__init__([("MI300X", 1)])
        self.usage: DeviceUsage | None = None

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        return (self.usage,) if self.usage is not None else ()
