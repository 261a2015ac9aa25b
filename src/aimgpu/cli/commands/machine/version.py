import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version

import click

from aimgpu.cli.output import examples, json_option, print_json


def read_version() -> str:
    try:
        return distribution_version("aimgpu")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"


@click.command(epilog=examples("aimgpu version", "aimgpu version --json"))
@json_option
def version(as_json: bool) -> None:
    """Say which version this is, and which Python runs it."""
    facts = {"version": read_version(), "python": platform.python_version(), "machine": platform.machine()}
    if as_json:
        print_json(facts)
    else:
        click.echo(f"aimgpu {facts['version']} (Python {facts['python']}, {facts['machine']})")
