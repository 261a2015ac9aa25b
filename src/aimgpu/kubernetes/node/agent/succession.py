"""One agent after another on a node: in a rolling update the new pod is there before the old one goes."""

import asyncio
import logging

from aimgpu.errors import LedgerOwned
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.metrics_server import MetricsServer
from aimgpu.kubernetes.node.agent.agent import Agent
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.agent.wiring import check_hardware, make_hardware

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


async def run_in_turn(options: Options, client: Client) -> None:
    """Waits while another agent has the node, then runs.

    It is ready while it waits, which is when the old one is stopped: its image is there, it starts, and it can read the GPUs.
    One that cannot do so ends before that, and the old one stays.
    """
    await (await take_over(options, client)).run()


async def take_over(options: Options, client: Client) -> Agent:
    try:
        return Agent(options, client)
    except LedgerOwned as error:
        log.info("agent.waits", extra={"data": {"reason": error.message}})
    check_hardware(make_hardware(options))
    waiting = MetricsServer(options.metrics_port, lambda: b"")
    if options.metrics_port:
        await waiting.start()
    try:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                return Agent(options, client)
            except LedgerOwned:
                continue
    finally:
        await waiting.stop()
