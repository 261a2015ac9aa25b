"""`aimgpu resize`: another share of memory for a model that runs."""

import click

from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.running_models import complete_running, connect_or_name_left
from aimgpu.home import find_home
from aimgpu.units import format_bytes, parse_bytes


@click.command(
    epilog=examples(
        "aimgpu resize chat --memory 12GiB",
        "aimgpu resize chat --memory 6GiB --dry-run   # say what would happen, with the figures",
        "aimgpu resize chat --memory 12GiB --json | jq '.changes[].after_bytes'",
    )
)
@click.argument("model", shell_complete=complete_running)
@click.option("--memory", required=True, metavar="SIZE", help="The new share on each GPU that it uses, such as 12GiB.")
@click.option("--dry-run", is_flag=True, help="Check it and say what would change; change nothing.")
@json_option
def resize(model: str, memory: str, dry_run: bool, as_json: bool) -> None:
    """Change the memory that MODEL may hold, while it runs and answers.

    For models that the interposer (or the kernel) holds. Less than it uses, and more than its GPU has free, is refused with the
    figures. Programs that allocate as they go profit at once, Ollama at its next load; vLLM and llama.cpp take their memory
    when they start and use more only after a restart. The share is kept when the model restarts, until its entry in the stack
    file changes.
    """
    done = connect_or_name_left(find_home()).resize(model, parse_bytes(memory), dry_run=dry_run)
    if as_json:
        print_json(done)
        return
    for change in done["changes"]:
        before, after, used = (format_bytes(change[f"{name}_bytes"], up=True) for name in ("before", "after", "used"))
        verb = "would have" if dry_run else "has"
        click.echo(f"{change['instance']} {verb} {after} of {change['partition']} (before {before}, in use {used})")
    click.echo(f"{done['note'][:1].upper()}{done['note'][1:]}.")
