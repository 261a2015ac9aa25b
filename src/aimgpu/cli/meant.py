"""What was meant by a command line that is not understood: the line to paste instead."""

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches

import click

from aimgpu.errors import AimGpuError, UnknownProduct

# Words of other tools for the same things, and the command that is meant.
_COMMANDS = {
    "list": "ps",
    "ls": "ps",
    "status": "ps",
    "show": "ps",
    "models": "catalogue list",
    "search": "catalogue list",
    "stop": "down",
    "rm": "down",
    "remove": "down",
    "delete": "down",
    "unload": "down",
    "kill": "down",
    "serve": "up",
    "start": "up",
    "deploy": "up",
    "create": "up",
    "load": "up",
    "apply": "up",
    "ask": "run",
    "download": "pull",
    "fetch": "pull",
    "estimate": "size",
    "devices": "gpus",
    "nvidia-smi": "gpus",
    "rocm-smi": "gpus",
    "amd-smi": "gpus",
    "stats": "top",
    "monitor": "top",
    "metrics": "exporter",
    "info": "doctor",
    "check": "doctor",
    "ui": "web",
    "dashboard": "web",
    "open": "web",
    "key": "keys",
    "token": "keys",
    "tokens": "keys",
    "what-if": "plan",
}
_SUBCOMMANDS = {
    "create": "add",
    "new": "add",
    "rm": "remove",
    "delete": "remove",
    "revoke": "remove",
    "ls": "list",
    "show": "list",
    "set": "apply",
    "undo": "reset",
}
_MODES = ("SPX", "DPX", "TPX", "QPX", "CPX")
_OPTIONS = {
    "--quant": "--precision",
    "--quantization": "--precision",
    "--dtype": "--precision",
    "--ctx": "--context",
    "--ctx-size": "--context",
    "--context-length": "--context",
    "--max-model-len": "--context",
    "--max-num-seqs": "--concurrency",
    "--parallel": "--concurrency",
    "--simulate": "--gpu",
    "--device": "--gpu",
    "--background": "--detach",
    "--daemon": "--detach",
    "--force": "--yes",
    "-y": "--yes",
    "--mem": "--memory",
    "-m": "--memory",
}
_NEAREST = re.compile(r"Did you mean '([^']+)'\?(.*)", re.DOTALL)
_THOUSANDS = re.compile(r"'((\d{1,4})[kK])' is not a valid integer")


def find_hint(error: click.ClickException, arguments: Sequence[str]) -> str | None:
    """A line to paste, or the word of an option that is meant."""
    line = _line(error, [word for word in arguments if word != "--json"])
    if line is not None:
        return f"Did you mean `{_join(line)}`?"
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument) and (shown := _example(error)):
        return f"For example `{shown}`."
    return _word_of_option(error)


def name_lines(error: AimGpuError, arguments: Sequence[str]) -> str | None:
    """Of a name that is not known: the same line with each that may be meant; for all else the hint of the error."""
    arguments = [word for word in arguments if word != "--json"]
    if not isinstance(error, UnknownProduct) or error.typed not in arguments:
        near = _NEAREST.match(error.hint or "")
        typed = next((word for word in arguments[1:] if repr(word) in error.message), None)
        if near is None or typed is None:
            return error.hint
        line = [arguments[0], *_replace(arguments[1:], typed, [near[1]])]
        return f"Did you mean `{_join(line)}`?{near[2]}"
    lines = [_join(_replace(arguments, error.typed, [name])) for name in error.near]
    if not lines:
        return error.hint
    return f"Did you mean `{lines[0]}`?" if len(lines) == 1 else "\n  ".join(("Did you mean one of these?", *lines))


def _line(error: click.ClickException, arguments: Sequence[str]) -> list[str] | None:
    """What should have been typed; None where nobody can tell."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return None
    context = error.ctx
    if isinstance(error, click.NoSuchCommand):
        return _with_command(error.command_name, context, arguments)
    if isinstance(error, click.NoSuchOption):
        return _with_option(error.option_name, context, arguments)
    if isinstance(error, click.BadParameter) and (thousands := _THOUSANDS.search(error.message)):
        return _replace(arguments, thousands[1], [str(int(thousands[2]) * 1024)])
    return _with_loose_words(error, context, arguments)


def _with_command(name: str, context: click.Context, arguments: Sequence[str]) -> list[str] | None:
    group = context.command
    known = group.list_commands(context) if isinstance(group, click.Group) else []
    if context.command.name == "partition" and name.partition("/")[0].upper() in _MODES:
        return _replace(arguments, name, ["apply", "gpu0", name.upper()])
    if context.parent is None and name == "help":
        return [*(word for word in arguments if word != name), "--help"]
    others = _COMMANDS if context.parent is None else _SUBCOMMANDS
    meant = others.get(name, "").split() or get_close_matches(name, known, n=1)
    return _replace(arguments, name, meant) if meant and meant[0] in known else None


def _with_option(name: str, context: click.Context, arguments: Sequence[str]) -> list[str] | None:
    known = {option for parameter in context.command.params for option in parameter.opts}
    if name == "--all" and context.command.name == "down":
        return [word for word in arguments if word != name]
    meant = _OPTIONS.get(name)
    if meant not in known:
        meant = next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)
    if meant is None:
        return None
    given = next((word for word in arguments if word.partition("=")[0] == name), None)
    return _replace(arguments, given, [meant + given.removeprefix(name)]) if given is not None else None


def _with_loose_words(error: click.UsageError, context: click.Context, arguments: Sequence[str]) -> list[str] | None:
    """Words that the command takes in another form: `resize chat 3 GB`, `chat code hello`, `size qwen3 8b`."""
    command, words = context.command.name, list(arguments)
    if command == "resize" and isinstance(error, click.MissingParameter) and len(words) in (3, 4):
        memory = "".join(words[2:])
        return [*words[:2], "--memory", memory + "GiB" * memory.isdigit()]
    if not error.message.startswith("Got unexpected extra argument") or len(words) < 3 or any(w.startswith("-") for w in words):  # noqa: PLR2004
        return None
    if command == "chat":
        return ["run", words[1], " ".join(words[2:])]
    return [words[0], " ".join(words[1:])] if command == "size" else None


def _word_of_option(error: click.ClickException) -> str | None:
    """Of an option that takes a few words: the one that is meant."""
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    given = re.search(r"'([^']*)' is not one of", error.format_message())
    if not isinstance(kind, click.Choice) or given is None:
        return None
    near = get_close_matches(given[1].lower(), [str(one) for one in kind.choices], n=1)
    return f"Did you mean {near[0]}?" if near else None


def _example(error: click.MissingParameter) -> str | None:
    """The first of the command's help."""
    epilog = error.ctx.command.epilog if error.ctx is not None else None
    found = re.search(r"^ +(aimgpu .*?)(?: {2,}#.*)?$", epilog or "", re.MULTILINE)
    return found[1] if found else None


def _replace(arguments: Sequence[str], word: str, by: Sequence[str]) -> list[str]:
    place = list(arguments).index(word)
    return [*arguments[:place], *by, *arguments[place + 1 :]]


def _join(words: Sequence[str]) -> str:
    return shlex.join(["aimgpu", *words])
