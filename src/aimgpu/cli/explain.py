"""`aimgpu explain`: why a model is, or would be, where it is; or why it is nowhere."""

from pathlib import Path

import click

from aimgpu.cli.decide_view import explanation_json, print_explanation
from aimgpu.cli.decide_world import SizedAsk, file_option, read_world, size_asks, world_options
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.control.stackfile import read_stack
from aimgpu.errors import UnknownDeployment
from aimgpu.placement import Snapshot, ask_again, explain


@click.command(
    "explain",
    epilog=examples(
        "aimgpu explain chat",
        "aimgpu explain chat -f stack.yaml --gpu MI300X",
        "aimgpu explain chat --snapshot s.json --json",
    ),
)
@click.argument("name")
@file_option
@world_options
@json_option
def explain_command(*, name: str, path: Path, saved: Path | None, gpu: str | None, count: int, as_json: bool) -> None:
    """Why NAME, a model that runs or one of the stack file, goes where it goes: what every GPU offers or lacks.

    One that runs is judged as if it were to be placed again, now.
    """
    stack = read_stack(path) if path.exists() else None
    snapshot = read_world(saved, gpu, count, stack)
    running = [each for each in sorted(snapshot.running) if each == name or _deployment(snapshot, each) == name]
    if running:
        found = [(ask_again(snapshot, each), snapshot.without_instance(each)) for each in running]
    else:
        sized = size_asks([each for each in stack.deployments if each.name == name], snapshot) if stack else ()
        found = [(each.ask, snapshot) for each in sized]
    if not found:
        raise UnknownDeployment(f"neither runs {name!r} nor does {path} name it", hint="`aimgpu ps` lists what runs.")
    answers = [(ask, explain(world, ask)) for ask, world in found]
    if as_json:
        print_json([explanation_json(ask, answer) for ask, answer in answers])
        return
    for ask, answer in answers:
        print_explanation(SizedAsk(ask=ask), answer)


def _deployment(snapshot: Snapshot, instance_id: str) -> str | None:
    ask = snapshot.running[instance_id]
    return ask.deployment or ask.name
