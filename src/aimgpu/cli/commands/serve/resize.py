"""`aimgpu resize`: another share of memory for a model that runs."""

import sys

import click

from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.running_models import complete_running, connect_or_name_left
from aimgpu.errors import InvalidInput
from aimgpu.home import find_home
from aimgpu.units import format_bytes, parse_bytes


@click.command(
    epilog=examples(
        "aimgpu resize chat --memory 12GiB",
        "aimgpu resize chat --memory 6GiB --dry-run   # say what would happen, with the figures",
        "aimgpu resize chat --memory 12GiB --json | jq '.changes[].after_bytes'",
        "aimgpu resize chat --memory 12GiB --on kubernetes",
    )
)
@click.argument("model", shell_complete=complete_running)
@click.option("--memory", required=True, metavar="SIZE", help="The new share on each GPU that it uses, such as 12GiB.")
@click.option("--dry-run", is_flag=True, help="Check it and say what would change; change nothing.")
@click.option("--detach", is_flag=True, help="With --on kubernetes: do not wait until the new pods are ready.")
@on_option
@json_option
def resize(  # noqa: PLR0917 -- one for each option
    model: str, memory: str, dry_run: bool, detach: bool, as_json: bool, cluster: ClusterTarget | None
) -> None:
    """Change the memory that MODEL may hold.

    On this machine it runs on and answers. This is for models that the interposer (or the kernel) holds; less than it uses, and
    more than its GPU has free, is refused with the figures. Programs that allocate as they go profit at once, Ollama at its
    next load; vLLM and llama.cpp take their memory when they start and use more only after a restart. The share is kept when
    the model restarts, until its entry in the stack file changes.

    With --on kubernetes the pods are replaced, because Kubernetes changes no claim that is allocated. The old pod answers until
    the new one is ready where there is room for both; what cannot be placed is refused before anything changes.
    """
    if cluster is not None:
        from aimgpu.cli.commands.cluster import resizing  # noqa: PLC0415 -- a third of a second to import

        asked = resizing.ClusterResize(
            model=model, memory_bytes=parse_bytes(memory), dry_run=dry_run, detach=detach, as_json=as_json
        )
        sys.exit(resizing.resize_in_cluster(cluster, asked))
    if detach:
        raise InvalidInput("--detach is for a cluster: here nothing is restarted", hint="Leave it out.")
    done = connect_or_name_left(find_home()).resize(model, parse_bytes(memory), dry_run=dry_run)
    if as_json:
        print_json(done)
        return
    for change in done["changes"]:
        before, after, used = (format_bytes(change[f"{name}_bytes"], up=True) for name in ("before", "after", "used"))
        verb = "would have" if dry_run else "has"
        click.echo(f"{change['instance']} {verb} {after} of {change['partition']} (before {before}, in use {used})")
    click.echo(f"{done['note'][:1].upper()}{done['note'][1:]}.")
