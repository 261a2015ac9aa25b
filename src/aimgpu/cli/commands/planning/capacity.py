"""`aimgpu capacity`: how many GPUs a stack needs."""

from collections import Counter
from pathlib import Path

import click

from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.commands.cluster.planning import show_room_in_cluster
from aimgpu.cli.output import examples, json_option, print_json, print_table
from aimgpu.cli.stack_source import read_source
from aimgpu.cli.views.plan import plan_rows, refusal_json
from aimgpu.cli.what_if import empty_machine, file_option, size_asks
from aimgpu.domain import Refusal
from aimgpu.domain.codec import encode
from aimgpu.errors import PlacementRefused
from aimgpu.placement.capacity.capacity import Capacity, plan_capacity


@click.command(
    epilog=examples(
        "aimgpu capacity -f stack.yaml --gpu MI300X",
        "aimgpu capacity -f stack.yaml --gpu H200-141 --json",
        "aimgpu capacity -f stack.yaml --on kubernetes",
    )
)
@file_option
@click.option(
    "--gpu",
    "--simulated",
    "gpu",
    metavar="PRODUCT",
    default="MI300X",
    show_default=True,
    help="The GPU product to count, such as MI355X or H200-141.",
)
@json_option
@on_option
def capacity(path: Path, gpu: str, cluster: ClusterTarget | None, as_json: bool) -> None:
    """How many GPUs of a product the models of a stack need and in which layouts, with a bound that no plan can beat.

    On a cluster: how many more of each model fit beside what runs there.
    """
    if cluster is not None:
        show_room_in_cluster(cluster, read_source(path).stack.deployments, as_json=as_json)
        return
    machine = empty_machine(gpu, 1)
    template = machine.snapshot.nodes[0].devices[0]
    sized = size_asks(read_source(path).stack.deployments, machine)
    found = plan_capacity(template, [each.ask for each in sized])
    if isinstance(found, Refusal):
        if as_json:
            print_json(refusal_json(found))
        raise PlacementRefused(found.summary, hint=" ".join(found.would_fit) or None)
    if as_json:
        print_json(_capacity_json(found, template.device.product))
        return
    for note in dict.fromkeys(note for each in sized for note in each.notes):
        click.echo(f"Note: {note}")
    proof = "and none can do with fewer" if found.proven_best else f"and no plan can do with fewer than {found.bound}"
    click.echo(f"{found.devices} x {template.device.product} hold {len(sized)} models, {proof}.")
    for layout, count in sorted(Counter(found.layouts).items()):
        click.echo(f"  {count} x {layout}")
    print_table(["NAME", "PARTITION", "MEMORY", "COMPUTE", "ALONE"], plan_rows(found.plan, found.after))


def _capacity_json(found: Capacity, product: str) -> dict[str, object]:
    return {
        "product": product,
        "devices": found.devices,
        "bound": found.bound,
        "proven_best": found.proven_best,
        "layouts": list(found.layouts),
        "placements": encode(found.plan.placements),
    }
