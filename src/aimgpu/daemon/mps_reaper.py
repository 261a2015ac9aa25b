"""MPS daemons of this home: each lives as long as something is granted on its partition, also over a crash of ours."""

import asyncio
import logging

from aimgpu.control.controller import Controller
from aimgpu.errors import AimGpuError
from aimgpu.hardware.nvidia.mps import MpsDaemons

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


async def keep_mps(controller: Controller, daemons: MpsDaemons, reconciled: asyncio.Event) -> None:
    await reconciled.wait()
    while True:
        await asyncio.to_thread(end_unused_mps, controller, daemons)
        await asyncio.sleep(_LOOK_SECONDS)


def end_unused_mps(controller: Controller, daemons: MpsDaemons) -> None:
    """Does nothing, cheaply, where MPS was never used. Never raises: the next look tries again."""
    if not daemons.left_over():
        return
    try:
        for uuid in daemons.end_unused(lambda uuid: uuid in _granted(controller)):
            log.info("mps.ended", extra={"data": {"partition": uuid}})
    except (AimGpuError, OSError) as error:
        log.error("mps.not_ended", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it


def _granted(controller: Controller) -> set[str]:
    """UUIDs of the partitions on which something is granted."""
    held = {grant.partition_id for instance in controller.instances() for grant in instance.grants}
    parts = (part for device in controller.devices() for part in device.layout.partitions)
    return {part.uuid for part in parts if part.uuid is not None and part.id in held}
