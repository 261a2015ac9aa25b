"""``python -m aimgpu.kubernetes.page``: the page of a cluster, until SIGTERM or Ctrl-C."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.access import read_access
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.program import report_error
from aimgpu.kubernetes.cluster.placeable import refuse_unplaceable
from aimgpu.kubernetes.models.page.control_api import ApplySettings
from aimgpu.kubernetes.models.page.service import PageSettings, serve_page
from aimgpu.kubernetes.models.serving.cluster_view import find_installed_image
from aimgpu.logs import configure_logging


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 when stopped, that of the error otherwise."""
    parser = argparse.ArgumentParser(prog="python -m aimgpu.kubernetes.page", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--context", default="")
    parser.add_argument("--namespace", help="whose models are shown; all unless it is given")
    parser.add_argument("--image", help="of this project, for models on its own engine")
    parser.add_argument("--pull-policy", help="of the models' pods")
    parser.add_argument("--own-rights", action="store_true", help="changes have this process' rights; else the caller's")
    given = parser.parse_args(arguments)
    configure_logging()
    try:
        asyncio.run(_serve(given))
    except AimGpuError as error:
        return report_error(error)
    return 0


async def _serve(given: argparse.Namespace) -> None:
    access = read_access(kubeconfig=given.kubeconfig, context=given.context)
    async with Client(access) as client:
        applied = ApplySettings(
            image=given.image or await find_installed_image(client),
            check_shares=refuse_unplaceable,
            namespace=given.namespace or (client.namespace if given.own_rights else None) or "default",
            pull_policy=given.pull_policy,
        )
        settings = PageSettings(
            host=given.host, port=given.port, namespace=given.namespace, own_rights=given.own_rights, applied=applied
        )
        serving = asyncio.ensure_future(serve_page(client, settings))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
