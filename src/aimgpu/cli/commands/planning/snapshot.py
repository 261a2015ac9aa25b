"""`aimgpu snapshot`: everything a decision looks at, as one file."""

from pathlib import Path

import click

from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.what_if import read_world, world_options, world_to_json


@click.command(
    epilog=examples(
        "aimgpu snapshot > s.json",
        "aimgpu plan --snapshot s.json       # the same answer, on any machine",
        "aimgpu snapshot --gpu MI300X --count 8 > box.json",
    )
)
@world_options
@json_option
def snapshot(saved: Path | None, gpu: str | None, count: int, as_json: bool) -> None:  # noqa: ARG001 - JSON either way
    """Print what decisions are made from: GPUs, layouts, grants, measured use, what runs. Always JSON.

    `sizing` holds what models are sized by here: versions of engines, what earlier runs took, models of your own.
    """
    print_json(world_to_json(read_world(saved, gpu, count)))
