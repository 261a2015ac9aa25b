"""What the daemon does by itself: repair at start, then notice what died and what lies idle."""

import asyncio
import logging
import time

from aimgpu.control.controller import Controller
from aimgpu.control.events import Event
from aimgpu.control.retry import FailureRecord, is_due, note_failure, note_retry
from aimgpu.daemon.activator import Activator
from aimgpu.errors import AimGpuError

log = logging.getLogger(__name__)

_SUPERVISE_SECONDS = 1.0


async def reconcile(controller: Controller, reconciled: asyncio.Event) -> None:
    if controller.parts.ledger.set_aside is not None:
        log.error("ledger.corrupt", extra={"data": {"kept_as": str(controller.parts.ledger.set_aside)}})
    try:
        repairs = await asyncio.to_thread(controller.reconcile, emit=log_event, wait=False)
        done = [f"{repair.kind.value} {repair.instance_id}" for repair in repairs]
        log.info("daemon.reconciled", extra={"data": {"repairs": done}})
    except AimGpuError as error:
        log.error("daemon.reconcile_failed", extra={"data": error.to_json()})  # noqa: TRY400 - the reason is in it
    except Exception:
        log.exception("daemon.reconcile_failed")
    finally:
        reconciled.set()


async def supervise(controller: Controller, activator: Activator, reconciled: asyncio.Event) -> None:
    """Notice instances that died in use, and start them again with a growing delay; try again what had no room."""
    await reconciled.wait()
    troubles: dict[str, FailureRecord] = {}
    timing = controller.parts.timing
    while True:
        await asyncio.sleep(_SUPERVISE_SECONDS)
        now = time.monotonic()
        try:
            for name in await asyncio.to_thread(controller.supervise, emit=log_event):
                controller.statistics.count_restart(name)
                troubles[name] = note_failure(troubles.get(name, FailureRecord()), now, timing)
                data = {"deployment": name, "failures": troubles[name].failures}
                log.warning("deployment.lost_an_instance", extra={"data": data})
            due = [name for name, trouble in troubles.items() if is_due(trouble, now)]
            troubles |= {name: note_retry(troubles[name]) for name in due}
            await asyncio.to_thread(controller.redeploy, due, emit=log_event, wait=False)
            await asyncio.to_thread(controller.retry_waiting, emit=log_event, wait=False)
            await asyncio.to_thread(activator.tick)
        except AimGpuError as error:
            log.error("supervision.failed", extra={"data": error.to_json()})  # noqa: TRY400 - the reason is in it
        except Exception:  # whatever it was, the next round must come: without it nothing is ever restarted
            log.exception("supervision.failed")


def log_event(event: Event) -> None:
    data = {"kind": event.kind.value, "deployment": event.deployment, "text": event.text}
    log.info("controller.event", extra={"data": data})
