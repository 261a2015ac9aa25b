"""``python -m aimgpu.kubernetes.node.agent``: run the node agent until it is stopped."""

import asyncio
import signal
import sys

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.program import report_error
from aimgpu.kubernetes.node.agent.options import parse_options
from aimgpu.kubernetes.node.agent.succession import run_in_turn
from aimgpu.logs import configure_logging


async def _serve() -> None:
    options = parse_options(sys.argv[1:])
    async with Client.from_environment() as client:
        running = asyncio.ensure_future(run_in_turn(options, client))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            return


def main() -> int:
    configure_logging()
    try:
        asyncio.run(_serve())
    except AimGpuError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
