"""``python -m aimgpu.kubernetes.models.gateway``: serve the models of a cluster until SIGTERM."""

import asyncio
import sys

import uvloop

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.program import report_error
from aimgpu.kubernetes.models.gateway.options import ClusterGatewayOptions, parse_options
from aimgpu.kubernetes.models.gateway.service import ClusterGateway
from aimgpu.logs import configure_logging


async def serve(options: ClusterGatewayOptions) -> None:
    """Connect to the API server and serve."""
    async with Client.from_environment() as client:
        await ClusterGateway(client, options).run()


if __name__ == "__main__":
    configure_logging()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(parse_options(sys.argv[1:])))
    except AimGpuError as error:
        sys.exit(report_error(error))
