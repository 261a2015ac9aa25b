"""`aimgpu`: a click group that imports a command when it is called, and the one place where errors become exit statuses."""

import sys
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from aimgpu.cli.meant import find_hint, name_lines
from aimgpu.cli.output import OutputState, chosen_colour, print_error
from aimgpu.cli.registry import SECTIONS, command_names, find_entry
from aimgpu.errors import AimGpuError, from_os_error

INTERRUPTED = 130  # 128 + SIGINT, what shells report


class LazyGroup(click.Group):
    """Knows its commands from the registry; imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's hook
        return command_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- click's hook
        entry = find_entry(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if find_entry(name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.NoSuchCommand(name, message=f"there is no command {name!r}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's hook
        width = max(map(len, command_names()))
        for section, entries in SECTIONS.items():
            if entries:
                with formatter.section(section):
                    formatter.write_dl([(name.ljust(width), entry.help) for name, entry in entries.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in command_names() if name.startswith(incomplete)]
        items = [CompletionItem(name, help=entry.help) for name in names if (entry := find_entry(name))]
        return items + click.Command.shell_complete(self, ctx, incomplete)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # click calls it by position
    if value and not ctx.resilient_parsing:
        from aimgpu.cli.commands.machine.version import read_version  # noqa: PLC0415 -- importlib.metadata is slow to import

        click.echo(f"aimgpu {read_version()}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`aimgpu COMMAND --help` explains a command, with examples. Start with `aimgpu up`.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version and exit."
)
def cli() -> None:
    """Put many models on one GPU, each with the memory, the compute and the latency it was promised."""


def main(arguments: list[str] | None = None) -> None:
    """The entry point: errors go to stderr as text, or as JSON when `--json` was asked for."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit status."""
    state = OutputState(as_json=False)
    try:
        status = cli.main(arguments, prog_name="aimgpu", standalone_mode=False, obj=state, color=chosen_colour())
    except AimGpuError as error:
        print_error({**error.to_json(), "hint": name_lines(error, arguments)}, as_json=state.as_json)
        return error.exit_status
    except click.Abort:  # click makes one of KeyboardInterrupt
        return INTERRUPTED
    except click.ClickException as error:
        # The parser may have stopped before it reached --json.
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            click.echo(error.format_message())
        else:
            print_error(_describe_click_error(error, arguments), as_json=state.as_json or "--json" in arguments)
        return error.exit_code
    except OSError as error:
        found = from_os_error(error)
        print_error(found.to_json(), as_json=state.as_json)
        return found.exit_status
    except click.exceptions.Exit as error:
        return error.exit_code
    return status if isinstance(status, int) else 0


def _describe_click_error(error: click.ClickException, arguments: list[str]) -> dict[str, str | None]:
    guessed = isinstance(error, click.NoSuchCommand | click.NoSuchOption)  # click's guesses follow its message
    message = (error.message if guessed else error.format_message()).rstrip(".")
    message = message.replace("is not a valid integer range", "is not a whole number").replace(
        "is not a valid float range", "is not a number"
    )
    hint = find_hint(error, arguments)
    if hint is None and isinstance(error, click.UsageError) and error.ctx is not None:
        shows = "lists the commands" if error.ctx.parent is None else "shows what it takes"
        hint = f"`{error.ctx.command_path} --help` {shows}."
    return {"code": "usage", "message": message[:1].lower() + message[1:], "hint": hint}


if __name__ == "__main__":
    main()
