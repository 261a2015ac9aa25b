"""Replaces engines that the gateway found unable to serve: those that refuse our key, and those that a request has blocked."""

import asyncio
import logging
from collections.abc import Callable

from aimgpu.errors import AimGpuError
from aimgpu.gateway.engine_faults import EngineFaults

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5

Replace = Callable[[str], None]  # by its id: stop an instance, and start its deployment again


async def replace_faulty(faults: EngineFaults, replace: Replace, reconciled: asyncio.Event) -> None:
    """Replace engines that were reported as faulty, for as long as the daemon runs."""
    await reconciled.wait()
    while True:
        for instance_id, reason in faults.take().items():
            log.warning("engine.replaced", extra={"data": {"instance": instance_id, "reason": reason}})
            try:
                await asyncio.to_thread(replace, instance_id)
            except AimGpuError as error:
                log.error("engine.not_replaced", extra={"data": {"instance": instance_id, **error.to_json()}})  # noqa: TRY400
        await asyncio.sleep(_LOOK_SECONDS)
