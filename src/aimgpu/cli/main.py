"""`aimgpu`: a click group that imports a command when it is called, and the one place where errors become exit statuses."""

import sys
from difflib import get_close_matches
from importlib import import_module
from json import dumps
from os import environ

import click
from click.shell_completion import CompletionItem

from aimgpu.cli.output import OutputState
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
            near = get_close_matches(name, command_names(), n=1)
            hint = f"Did you mean `aimgpu {near[0]}`?" if near else "`aimgpu --help` lists the commands."
            raise UnknownCommand(f"there is no command {name!r}", hint)
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


class UnknownCommand(click.UsageError):
    """A word that is no command, with the nearest ones."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


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
        status = cli.main(arguments, prog_name="aimgpu", standalone_mode=False, obj=state, color=_colour())
    except AimGpuError as error:
        _print_error(error.to_json(), as_json=state.as_json)
        return error.exit_status
    except click.Abort:  # click makes one of KeyboardInterrupt
        return INTERRUPTED
    except click.ClickException as error:
        # The parser may have stopped before it reached --json.
        _print_error(_describe_click_error(error), as_json=state.as_json or "--json" in arguments)
        return error.exit_code
    except OSError as error:
        found = from_os_error(error)
        _print_error(found.to_json(), as_json=state.as_json)
        return found.exit_status
    except click.exceptions.Exit as error:
        return error.exit_code
    return status if isinstance(status, int) else 0


def _colour() -> bool | None:
    """Never where NO_COLOR is set (no-color.org), which click does not look at; else click decides."""
    return False if environ.get("NO_COLOR") else None


def _describe_click_error(error: click.ClickException) -> dict[str, str | None]:
    message = error.format_message().rstrip(".")
    hint = getattr(error, "hint", None)
    if hint is None and isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"`{error.ctx.command_path} --help` shows what it takes."
    return {"code": "usage", "message": message[:1].lower() + message[1:], "hint": hint}


def _print_error(error: dict[str, str | None], *, as_json: bool) -> None:
    if as_json:
        click.echo(dumps({"error": error}), err=True)
        return
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error['message']}", err=True, color=_colour())
    if error["hint"]:
        click.echo(f"{click.style('hint:', fg='yellow')} {error['hint']}", err=True, color=_colour())


if __name__ == "__main__":
    main()
