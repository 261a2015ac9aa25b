"""`aimgpu snapshot`: everything a decision looks at, as one file."""

from pathlib import Path

import click

from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.cli.commands.cluster.planning import read_cluster_world
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.what_if import read_world, refuse_other_gpus, world_options, world_to_json


@click.command(
    epilog=examples(
        "aimgpu snapshot > s.json",
        "aimgpu plan --snapshot s.json       # the same answer, on any machine",
        "aimgpu snapshot --gpu MI300X --count 8 > box.json",
        "aimgpu snapshot --on kubernetes > cluster.json",
    )
)
@world_options
@json_option
def snapshot(  # as_json: JSON either way
    saved: Path | None,
    gpu: str | None,
    count: int,
    cluster: ClusterTarget | None,
    as_json: bool,  # noqa: ARG001
) -> None:
    """Print what decisions are made from: GPUs, layouts, grants, measured use, what runs. Always JSON.

    `sizing` holds what models are sized by here: versions of engines, what earlier runs took, models of your own.
    """
    refuse_other_gpus(saved, gpu, cluster)
    world = read_world(saved, gpu, count) if cluster is None else read_cluster_world(cluster)[0]
    print_json(world_to_json(world))
