"""What the daemon does by itself: repair at start, then notice what died and what lies idle."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aimgpu.control.controller import Controller
from aimgpu.control.events import Event
from aimgpu.engines.launchers.log_bound import bound_log
from aimgpu.errors import AimGpuError

log = logging.getLogger(__name__)

_SUPERVISE_SECONDS = 1.0
_LEAST_PAUSE_SECONDS = 0.1
_BOUND_LOG_SECONDS = 30.0


async def reconcile(controller: Controller, corrupt_ledger: Path | None, reconciled: asyncio.Event) -> None:
    """Once, at start; commands that change something wait for `reconciled`."""
    if corrupt_ledger is not None:
        log.error("ledger.corrupt", extra={"data": {"kept_as": str(corrupt_ledger)}})
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


async def supervise(controller: Controller, reconciled: asyncio.Event) -> None:
    """Notice instances that died, and start them again when they are due."""
    await reconciled.wait()

    def check() -> None:
        for name in controller.supervise(emit=log_event):
            controller.statistics.count_restart(name)
            log.warning("deployment.lost_an_instance", extra={"data": {"deployment": name}})

    await _repeat(check, "supervision", lambda: min(_SUPERVISE_SECONDS, controller.next_retry_seconds()))


async def put_idle_to_sleep(tick: Callable[[], None], reconciled: asyncio.Event) -> None:
    """Beside `supervise`: unloading waits for requests in flight, and must not keep the dead from being noticed."""
    await reconciled.wait()
    await _repeat(tick, "idle", lambda: _SUPERVISE_SECONDS)


async def bound_own_log(path: Path) -> None:
    """Cut our own log while we run; another program's output, such as a terminal, is left alone."""
    while True:
        await asyncio.sleep(_BOUND_LOG_SECONDS)
        await asyncio.to_thread(bound_log, path)


async def _repeat(work: Callable[[], None], name: str, pause_seconds: Callable[[], float]) -> None:
    """In a thread of its own: a round that takes long delays nothing else."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    try:
        while True:
            await asyncio.sleep(max(_LEAST_PAUSE_SECONDS, pause_seconds()))
            await loop.run_in_executor(thread, _logged, work, name)
    finally:
        thread.shutdown(wait=False)


def _logged(work: Callable[[], None], name: str) -> None:
    """Whatever goes wrong, the next round must come: without it nothing is ever restarted."""
    try:
        work()
    except AimGpuError as error:
        log.error("supervisor.failed", extra={"data": {"round": name, **error.to_json()}})  # noqa: TRY400 - the reason is in it
    except Exception:
        log.exception("supervisor.failed", extra={"data": {"round": name}})


def log_event(event: Event) -> None:
    """For operations that no caller follows."""
    data = {"kind": event.kind.value, "deployment": event.deployment, "text": event.text}
    log.info("controller.event", extra={"data": data})
