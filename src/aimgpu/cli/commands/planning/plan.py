"""`aimgpu plan`: what a stack would get, and what would have to change for it."""

from collections.abc import Sequence
from pathlib import Path

import click

from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.cli.commands.cluster.planning import STANDING, read_cluster_world, size_asks_in_cluster
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.plan_options import limit_options
from aimgpu.cli.stack_source import choose_source
from aimgpu.cli.views.oversubscription import show_oversubscription
from aimgpu.cli.views.plan import plan_json, print_notes, print_plan, print_refusals, print_service
from aimgpu.cli.what_if import (
    FILE_HELP,
    SizedAsk,
    World,
    read_world,
    refuse_other_gpus,
    size_asks,
    without_running,
    world_options,
)
from aimgpu.domain import Refusal
from aimgpu.errors import InvalidInput, PlacementRefused
from aimgpu.placement import Cost, MovePlan
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import BatchPlan, plan_all, plan_consolidation

_MOST_NAMES = 8
NOTHING = MovePlan(asks=(), placements=(), steps=(), cost=Cost(), because="nothing is changed")


@click.command(
    epilog=examples(
        "aimgpu plan -f stack.yaml",
        'aimgpu plan qwen3:8b --gpu "RTX 4090"',
        "aimgpu plan -f stack.yaml --gpu MI300X --count 2",
        "aimgpu plan -f stack.yaml --snapshot s.json --json",
        "aimgpu plan -f stack.yaml --no-stop --no-move   # as things are, or by laying out idle GPUs",
        "aimgpu plan -f stack.yaml --arrivals log.csv   # on one GPU in turns: how many awake together, how many requests late",
        "aimgpu plan --on kubernetes -f stack.yaml",
        "aimgpu plan --free 2                # which models would have to move to free two whole GPUs",
    )
)
@click.argument("models", nargs=-1)
@click.option("-f", "--file", "path", type=click.Path(path_type=Path), help=f"{FILE_HELP} [./stack.yaml]")
@world_options
@click.option("--dry-run", is_flag=True, help="Accepted for clarity: a plan never changes anything.")
@limit_options
@click.option(
    "--free", type=click.IntRange(1, 64), metavar="GPUS", help="Plan the moves that free so many whole GPUs of one node."
)
@click.option(
    "--arrivals",
    type=click.Path(path_type=Path),
    help="Requests as CSV with the columns seconds and model: replay them on one GPU whose models sleep in turns.",
)
@json_option
def plan(
    *,
    models: tuple[str, ...],
    path: Path | None,
    saved: Path | None,
    gpu: str | None,
    count: int,
    cluster: ClusterTarget | None,
    dry_run: bool,
    limits: Limits,
    free: int | None,
    arrivals: Path | None,
    as_json: bool,
) -> None:
    """Where each model of the stack would go, and what would first be laid out, moved or stopped; nothing is done.

    MODELS may be named instead of a file, as for `aimgpu up`. What does not fit is refused, GPU by GPU, with the smallest
    change that would make it fit. On a cluster nothing is moved, stopped or laid out for a model.
    """
    del dry_run
    refuse_other_gpus(saved, gpu, cluster)
    sized: tuple[SizedAsk, ...] = ()
    if cluster is not None:
        if free is not None or arrivals is not None:
            raise InvalidInput("--free and --arrivals are about one machine", hint="Leave out --on kubernetes.")
        world, seen = read_cluster_world(cluster)
        stack = choose_source(path, models, example=False).stack
        sized = without_running(size_asks_in_cluster(stack.deployments, seen), world.snapshot)
        batch = plan_all(world.snapshot, [each.ask for each in sized], STANDING)
    elif free is not None:
        world = read_world(saved, gpu, count)
        found = plan_consolidation(world.snapshot, free, limits)
        batch = BatchPlan(plan=NOTHING, refusals=(found,)) if isinstance(found, Refusal) else BatchPlan(plan=found)
    else:
        stack = choose_source(path, models, example=False).stack
        world = read_world(saved, gpu, count, stack)
        if arrivals is not None:
            sized = size_asks(stack.deployments, world)
            show_oversubscription(stack.deployments, sized, world, arrivals, as_json=as_json)
            return
        sized = without_running(size_asks(stack.deployments, world), world.snapshot)
        batch = plan_all(world.snapshot, [each.ask for each in sized], limits)
    _show(batch, sized, world, as_json=as_json)


def _show(batch: BatchPlan, sized: Sequence[SizedAsk], world: World, *, as_json: bool) -> None:
    if as_json:
        print_json(plan_json(batch, sized, world.snapshot))
    else:
        print_notes(sized, world)
        if batch.plan.steps or not batch.refusals:
            print_plan(batch.plan, world.snapshot)
            print_service(batch.plan, sized)
        print_refusals(batch.refusals, world.snapshot)
    if batch.refusals:
        names = ", ".join(refusal.ask for refusal in batch.refusals[:_MOST_NAMES])
        names += ", ..." if len(batch.refusals) > _MOST_NAMES else ""
        what = f"{len(batch.refusals)} of {len(sized)} do not fit: {names}" if sized else "no moves free so many GPUs"
        raise PlacementRefused(what, hint="The reasons are above.")
