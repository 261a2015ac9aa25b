"""`aimgpu run`: start a model where it does not run yet, and chat with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import click

from aimgpu.cli.client import DaemonClient, connect
from aimgpu.cli.commands.serve.chat import Conversation
from aimgpu.cli.daemon_process import DaemonOptions, start_daemon
from aimgpu.cli.gateway_client import GatewayClient
from aimgpu.cli.output import examples, json_option
from aimgpu.cli.progress import show_progress
from aimgpu.cli.running_models import deployed_names
from aimgpu.cli.signals import signals_as_interrupt
from aimgpu.cli.stack_source import StackText, name_of, source_of_models
from aimgpu.cli.views.apply import follow_apply, refusal_error
from aimgpu.cli.views.status import print_simulated
from aimgpu.errors import EngineFailed, UnknownModel
from aimgpu.home import find_home


@click.command(
    epilog=examples(
        "aimgpu run smollm2", 'aimgpu run smollm2 "Why is the sky blue?"', "aimgpu run ./mine.gguf", "aimgpu run chat=smollm2"
    )
)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", help="The system prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The longest answer.")
@click.option("--key", envvar="AIMGPU_API_KEY", show_envvar=True, help="An API key, where one is needed.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, envvar="AIMGPU_PORT", show_default=True, show_envvar=True)
@json_option
def run(  # noqa: PLR0917 -- click passes them by name
    model: str, prompt: str | None, system: str | None, max_tokens: int | None, key: str | None, port: int, as_json: bool
) -> None:
    """Talk to MODEL; if it does not run yet, it is fetched, sized and started first.

    MODEL is a deployment that runs, a model's name, or the path of a .gguf file. With PROMPT one answer is printed. What was
    started keeps running in the background; `aimgpu down` stops it.
    """
    served = _serve(model, port, quiet=as_json)
    gateway = GatewayClient(served.url, key)
    conversation = Conversation(gateway, served.name, system=system, max_tokens=max_tokens, as_json=as_json)
    if prompt is not None:
        conversation.say(prompt)
    else:
        conversation.hold()
    if served.started and not as_json:
        stop = "aimgpu down" if served.alone else f"aimgpu down {served.name}"  # without a name it stops all models
        click.secho(f"{served.name} keeps running at {served.url}/v1. Stop it with: {stop}", dim=True, err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    name: str
    url: str
    started: bool
    alone: bool = False  # no daemon ran before


def _serve(model: str, port: int, *, quiet: bool) -> _Served:
    home = find_home()
    record = home.read_daemon()
    if record is not None:
        client = connect(home)
        running = _find_running(client.read_status(), model)
        if running is not None:
            return _Served(name=running, url=record.url, started=False)
        return _Served(name=_start(client, _source(model, deployed_names(client.read_status()))), url=record.url, started=True)
    source = _source(model, ())
    with signals_as_interrupt():
        daemon = start_daemon(home, DaemonOptions(port=port))
        try:
            if not quiet:
                print_simulated(daemon.client.read_status())
            name = _start(daemon.client, source)
            daemon.keep()
            return _Served(name=name, url=daemon.record.url, started=True, alone=True)
        finally:
            daemon.stop()


def _source(model: str, deployed: Iterable[str]) -> StackText:
    """Raises UnknownModel: what is deployed and has a name like it before what might be fetched."""
    try:
        return source_of_models((model,))
    except UnknownModel as error:
        error.near = (*get_close_matches(model, sorted(deployed)), *error.near)
        raise


def _find_running(status: dict[str, Any], model: str) -> str | None:
    """A deployment of this name, or one that is made from this model."""
    names = [str(one["name"]) for one in status.get("deployments", ())]
    name, separator, _ = model.partition("=")
    wanted = name if separator else model
    called = {name.casefold(): name for name in names} | {name: name for name in names}
    if not separator or wanted in names:
        wanted = called.get(wanted, called.get(wanted.casefold(), wanted))
    if wanted in names:
        return wanted
    made_from = {str(one["model"]): str(one["name"]) for one in status.get("instances", ())}
    return made_from.get(model) or (name_of(model) if name_of(model) in names and not separator else None)


def _start(client: DaemonClient, source: StackText) -> str:
    with show_progress() as display:
        outcome = follow_apply(client.apply(source.text, str(source.base_directory)), display, client.read_status())
    if outcome.error is not None:
        raise outcome.error
    if outcome.refusals:
        raise refusal_error(outcome, alone="model")
    name = source.stack.deployments[0].name
    if outcome.failed:
        raise EngineFailed(f"{name} did not start", hint=f"`aimgpu logs {name}` has what its engine printed.")
    return name
