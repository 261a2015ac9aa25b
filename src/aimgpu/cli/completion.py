import click
from click.shell_completion import get_completion_class

from aimgpu.cli.output import examples, json_option, print_json

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog=examples(
        'eval "$(aimgpu completion bash)"    # in ~/.bashrc',
        'eval "$(aimgpu completion zsh)"     # in ~/.zshrc',
        "aimgpu completion fish > ~/.config/fish/completions/aimgpu.fish",
    )
)
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script of SHELL, for the shell to evaluate."""
    completer = get_completion_class(shell)
    if completer is None:  # click dropped a shell
        raise click.UsageError(f"no completion for {shell}")
    root = ctx.find_root().command
    # Not .source(): for bash that runs bash to check its version, which is not needed to print the script.
    script = completer(root, {}, "aimgpu", "_AIMGPU_COMPLETE")
    text = script.source_template % script.source_vars()
    if as_json:
        print_json({"shell": shell, "script": text})
    else:
        click.echo(text)
