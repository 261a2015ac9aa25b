"""A program in a pod: run until SIGTERM, report an error of ours in one line."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Client
from aimgpu.logs import configure_logging


def run_program(start: Callable[[Client], "asyncio.Future[None]"]) -> int:
    """Exit status: 0 when stopped, that of the error otherwise."""
    configure_logging()
    try:
        asyncio.run(_serve(start))
    except AimGpuError as error:
        return report_error(error)
    return 0


def report_error(error: AimGpuError) -> int:
    """On stderr, for the pod's log; returns the exit status."""
    print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)  # noqa: T201
    return error.exit_status


async def _serve(start: Callable[[Client], "asyncio.Future[None]"]) -> None:
    async with Client.from_environment() as client:
        running = start(client)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await running
