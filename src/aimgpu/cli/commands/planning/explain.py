"""`aimgpu explain`: why a model is, or would be, where it is; or why it is nowhere."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from aimgpu.cli.client import connect
from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.cli.commands.cluster.planning import explain_in_cluster
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.plan_options import limit_options
from aimgpu.cli.running_models import complete_running
from aimgpu.cli.stack_source import read_source
from aimgpu.cli.views.plan import explanation_json, print_explanation, print_notes
from aimgpu.cli.what_if import (
    SizedAsk,
    World,
    file_option,
    read_world,
    refuse_other_gpus,
    size_asks,
    without_running,
    world_options,
)
from aimgpu.errors import InvalidInput, UnknownDeployment, suggest_nearest
from aimgpu.home import find_home
from aimgpu.placement import Snapshot
from aimgpu.placement.explain import Explanation, explain, explain_planned
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import ask_again, plan_all


@click.command(
    "explain",
    epilog=examples(
        "aimgpu explain chat",
        "aimgpu explain chat -f stack.yaml --gpu MI300X",
        "aimgpu explain chat --snapshot s.json --json",
        "aimgpu explain chat --memory    # why it is awake or asleep",
        "aimgpu explain chat --on kubernetes",
    ),
)
@click.argument("name", shell_complete=complete_running)
@file_option
@world_options
@limit_options
@click.option("--memory", is_flag=True, help="Why it is awake or asleep now, instead.")
@json_option
def explain_command(
    *,
    name: str,
    path: Path,
    saved: Path | None,
    gpu: str | None,
    count: int,
    cluster: ClusterTarget | None,
    limits: Limits,
    memory: bool,
    as_json: bool,
) -> None:
    """Why NAME, a model that runs or one of the stack file, goes where it goes: what every GPU offers or lacks.

    One that runs is judged as if it were to be placed again, now. One of the stack is judged as in `aimgpu plan`: beside all
    others of the stack, and with the same changes made first. On a cluster: why each pod of the model is where it is, or waits.
    """
    refuse_other_gpus(saved, gpu, cluster)
    if memory and cluster is not None:
        raise InvalidInput("--memory is about one machine", hint="Leave out --on kubernetes.")
    if cluster is not None:
        explain_in_cluster(cluster, name, as_json=as_json)
        return
    if memory:
        _explain_residence(name, as_json=as_json)
        return
    stack = read_source(path).stack if _is_there(path) else None
    world = read_world(saved, gpu, count, stack)
    answers = [*_running(world.snapshot, name)]
    sized: tuple[SizedAsk, ...] = ()
    if stack is not None and any(each.name == name for each in stack.deployments):
        sized = without_running(size_asks(stack.deployments, world), world.snapshot)
        answers += _planned(world, sized, name, limits)
    if not answers:
        raise _unknown(name, path, world.snapshot, () if stack is None else [each.name for each in stack.deployments])
    if as_json:
        print_json([explanation_json(each, answer, world.snapshot) for each, answer in answers])
        return
    print_notes([each for each, _ in answers], world)
    for each, answer in answers:
        print_explanation(each, answer, world.snapshot)


def _explain_residence(name: str, *, as_json: bool) -> None:
    found = {one["name"]: one["residence"] for one in connect(find_home()).read_status()["deployments"]}
    if name not in found:
        hint = f"{suggest_nearest([name], [*found])}Running: {', '.join(sorted(found)) or 'none'}."
        raise UnknownDeployment(f"{name!r} does not run", hint=hint)
    if as_json:
        print_json({"name": name, "residence": found[name]})
    else:
        click.echo(f"{name} is {found[name] or 'neither awake nor asleep'}")


def _is_there(path: Path) -> bool:
    return str(path) == "-" or path.exists()


def _unknown(name: str, path: Path, snapshot: Snapshot, named: Sequence[str]) -> UnknownDeployment:
    running = {_deployment(snapshot, each) or each for each in snapshot.running}
    file = f"{path} does not name it" if _is_there(path) else f"there is no {path}"
    question = suggest_nearest([name], [*running, *named])
    in_file = f" In {path}: {', '.join(named) or 'none'}." if _is_there(path) else " Name a stack file with -f."
    if not running and not named:
        in_file += f" `{shlex.join(['aimgpu', 'plan', name])}` asks it of a model."
    hint = f"{question}Running: {', '.join(sorted(running)) or 'none'}.{in_file}"
    return UnknownDeployment(f"{name!r} does not run, and {file}", hint=hint)


def _running(snapshot: Snapshot, name: str) -> Iterator[tuple[SizedAsk, Explanation]]:
    for each in sorted(snapshot.running):
        if name in (each, _deployment(snapshot, each)):
            ask = ask_again(snapshot, each)
            yield SizedAsk(ask=ask), explain(snapshot.without_instance(each), ask)


def _planned(world: World, sized: tuple[SizedAsk, ...], name: str, limits: Limits) -> Iterator[tuple[SizedAsk, Explanation]]:
    mine = [each for each in sized if each.ask.deployment == name]
    if mine:
        batch = plan_all(world.snapshot, [each.ask for each in sized], limits)
        yield from ((each, explain_planned(world.snapshot, batch, each.ask)) for each in mine)


def _deployment(snapshot: Snapshot, instance_id: str) -> str | None:
    ask = snapshot.running[instance_id]
    return ask.deployment or ask.name
