"""`aimgpu compose`: a stack as a compose file, for those who run Docker themselves."""

from pathlib import Path
from tempfile import TemporaryDirectory

import click

from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.stack_source import read_source
from aimgpu.cli.views.gpu_names import names_of
from aimgpu.cli.what_if import file_option
from aimgpu.control.compose import ComposeOptions, compose_stack
from aimgpu.control.stack.stack_file import Stack
from aimgpu.errors import PlacementRefused
from aimgpu.home import Home, find_home
from aimgpu.wiring import choose_hardware, make_dependencies


@click.command(
    epilog=examples(
        "aimgpu compose -f stack.yaml > compose.yaml",
        "aimgpu compose -f stack.yaml --first-port 9000",
        "AIMGPU_ENGINE_KEY=$(openssl rand -hex 16) docker compose up   # then",
    )
)
@file_option
@click.option("--first-port", type=click.IntRange(1024, 65000), default=8001, show_default=True, help="Of the first model.")
@json_option
def compose(path: Path, first_port: int, as_json: bool) -> None:
    """Print a compose file for the stack: one service per model, with memory that adds up.

    Sized and placed as `aimgpu up` would, on the GPUs of this machine; nothing is started.
    """
    with TemporaryDirectory() as folder:
        text = _compose(read_source(path).stack, Path(folder), first_port)
    if as_json:
        print_json({"compose": text})
    else:
        click.echo(text, nl=False)


def _compose(stack: Stack, folder: Path, first_port: int) -> str:
    home = Home(folder)
    home.learn_from(find_home())
    dependencies = make_dependencies(home, choose_hardware(stack.gpus, home), lambda _: 0)
    try:
        text = compose_stack(dependencies, stack.deployments, ComposeOptions(folder=folder, first_port=first_port))
        rename = names_of(dependencies.hardware.read_devices())
        return "".join(rename(line) if line.startswith("#") else line for line in text.splitlines(keepends=True))
    except PlacementRefused as error:
        rename = names_of(dependencies.hardware.read_devices())
        raise PlacementRefused(rename(error.message), hint=error.hint and rename(error.hint)) from error
    finally:
        dependencies.ledger.close()
