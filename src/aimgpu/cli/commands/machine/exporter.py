"""`aimgpu exporter`: metrics of this machine's GPUs for Prometheus, with or without a daemon."""

import os
import sys

import click

from aimgpu.cli.options import simulated_option
from aimgpu.cli.output import examples, json_option
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.home import find_home

_PROGRAM = (sys.executable, "-m", "aimgpu.daemon.exporter")


@click.command(
    epilog=examples(
        "aimgpu exporter",
        "aimgpu exporter --host 0.0.0.0 --port 9400     # for a Prometheus on another machine",
        "curl http://127.0.0.1:9400/metrics",
    )
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9400, show_default=True, help="Port to listen on; 0: any.")
@click.option("--count", type=click.IntRange(1, 64), default=1, show_default=True, help="How many, with --gpu.")
@simulated_option
@json_option
def exporter(host: str, port: int, count: int, simulated: GpuChoice | None, as_json: bool) -> None:  # noqa: ARG001 - text always
    """Serve the metrics of this machine's GPUs at /metrics until it is stopped; prints its address first.

    A daemon serves the same and more on its own port: use this where none runs, such as on a node that only shares GPUs.
    """
    arguments = ["--home", str(find_home().path), "--host", host, "--port", str(port)]
    if simulated is not None and simulated.simulated is not None:
        arguments += ["--simulate", simulated.simulated, "--count", str(count)]
    os.execv(sys.executable, [*_PROGRAM, *arguments])  # noqa: S606 -- it takes this command's place
