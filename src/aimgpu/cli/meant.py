"""What was meant by a command line that is not understood: the line to paste instead."""

import json
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from os.path import expanduser  # unlike that of Path it never raises
from pathlib import Path

import click

from aimgpu.errors import AimGpuError, InvalidInput, InvalidQuantity, InvalidStackFile
from aimgpu.units import parse_bytes

# Words of other tools for the same things, and the command that is meant.
_COMMANDS = {
    "list": "ps",
    "ls": "ps",
    "status": "ps",
    "show": "size",
    "get": "ps",
    "config": "doctor",
    "init": "up --example",
    "attach": "chat",
    "talk": "chat",
    "prompt": "run",
    "generate": "run",
    "inspect": "explain",
    "describe": "explain",
    "why": "explain",
    "images": "catalogue list",
    "events": "top",
    "log": "logs",
    "quit": "down",
    "exit": "down",
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
    "env": "doctor",
    "calculate": "size",
    "vram": "size",
    "check": "doctor",
    "ui": "web",
    "dashboard": "web",
    "open": "web",
    "key": "keys",
    "token": "keys",
    "tokens": "keys",
    "what-if": "plan",
}
_ALONE = frozenset({"ps", "gpus", "top", "web", "doctor"})  # they take no words, but options
_NOTHING_LIKE_IT = frozenset({"cp", "copy", "login", "logout", "push"})  # and none that looks like them is meant
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
    "-c": "--context",
    "--num-ctx": "--context",
    "--ctx-size": "--context",
    "--context-length": "--context",
    "--max-model-len": "--context",
    "--max-num-seqs": "--concurrency",
    "--parallel": "--concurrency",
    "--batch-size": "--concurrency",
    "--tp": "--tensor-parallel",
    "--tensor-parallel-size": "--tensor-parallel",
    "--kv-cache-dtype": "--kv-precision",
    "--kv-cache": "--kv-precision",
    "--gpus": "--count --tensor-parallel",
    "--num-gpus": "--count --tensor-parallel",
    "--count": "--tensor-parallel",
    "-n": "--count",
    "--rpm": "--rate",
    "-p": "--port",
    "-a": "--wide",
    "--all": "--wide",
    "-w": "--wide",
    "-v": "--version",
    "-V": "--version",
    "--follow": "--watch",
    "--simulate": "--gpu",
    "--device": "--gpu",
    "--background": "--detach",
    "--daemon": "--detach",
    "--force": "--yes",
    "-y": "--yes",
    "--mem": "--memory",
    "-m": "--memory",
    "--vram": "--memory",
    "--gpu-memory": "--memory",
}
_WORDS = {  # of options that take one of a few
    "k8s": "kubernetes",
    "kube": "kubernetes",
    "cluster": "kubernetes",
    "local": "machine",
    "urgent": "high",
    "critical": "high",
    "normal": "medium",
    "default": "medium",
    "batch": "low",
    "best-effort": "low",
    "llama.cpp": "llamacpp",
    "llama-server": "llamacpp",
    "hf": "transformers",
}
_NEAREST = re.compile(r"Did you mean '([^']+)'\?(.*)", re.DOTALL)
_LISTED = re.compile(r"(?:Deployed|Running|Keys|Known|Measured|GPUs here|Devices here|It can have): ([^\s,]+)")
_SUCH_AS = re.compile(r" such as .* or (\S+)$")
_RUN = re.compile(r"`aimgpu run (\S+)`")
_INSTEAD = "Name one with as much memory"  # of a GPU that is like none of those known
_ATTACH = "`aimgpu up --attach`"
_IN_STACK = frozenset({"--gpu", "--memory", "--fraction", "--compute"})  # all but the first are keys below `gpu`
_AS_PUBLISHED = re.compile(r"'(?:best|auto|full|native|original|default|highest)' is not a precision", re.IGNORECASE)
_TAKE_MODELS = frozenset({"run", "up", "pull", "plan", "size"})
_PORT = re.compile(r"`--port (\d+)`")
_INTEGER = re.compile(r"'((\d{1,4})[kK]|\d{1,3}(?:[,_]\d{3})+)' is not a valid integer")


def find_hint(error: click.ClickException, arguments: Sequence[str]) -> str | None:
    """A line to paste, or the word of an option that is meant."""
    line = _line(error, [word for word in arguments if word != "--json"])
    if line is not None:
        return f"Did you mean `{_join(line)}`?"
    if isinstance(error, click.NoSuchOption) and (shown := _with_stack(error, arguments)):
        return f"Did you mean `{shown}`?"
    if isinstance(error, click.MissingParameter) and (shown := _example(error)):
        return f"For example `{shown}`."
    return None


def name_lines(error: AimGpuError, arguments: Sequence[str]) -> str | None:
    """Of a word that is wrong: the same line with each that may be meant; for all else the hint of the error."""
    words, hint = [word for word in arguments if word != "--json"], error.hint or ""
    near = error.near if isinstance(error, InvalidInput) else ()
    typed = error.typed if isinstance(error, InvalidInput) else None
    if typed not in words[1:]:
        typed = next((word for word in words[1:] if _is_wrong(word, error)), None)
    if (port := _PORT.search(hint)) is not None and words[:1] != ["exec"]:
        return hint.replace(port[0], f"`{_join(_with_port(words, port[1]))}`")
    if _ATTACH in hint and words[0] == "up":
        return hint.replace(_ATTACH, f"`{_join([*words, '--attach'])}`")
    if (model := _RUN.search(hint)) is not None and (other := _other_model(words, error)) is not None:
        return hint.replace(model[0], f"`{_join(_put(words, other, model[1]))}`", 1)
    kept = _without(words, "--precision") if _AS_PUBLISHED.match(error.message) else words
    if typed is None or kept != words:
        return error.hint if kept == words else _ask([kept])
    if (meant := _NEAREST.match(hint)) is not None:
        return f"{_ask([_put(words, typed, meant[1])])}{meant[2]}"
    question = f"{_INSTEAD}:" if hint.startswith(_INSTEAD) else "Did you mean one of these?"
    return _ask([_put(words, typed, name) for name in near], question) if near else _with_example(error, words, typed)


def _other_model(words: Sequence[str], error: AimGpuError) -> str | None:
    """The model of the line that cannot be had: its repository, or the path of a file that is not there."""
    if words[0] not in _TAKE_MODELS:
        return None
    for word in words[1:]:
        path = Path(expanduser(word))  # noqa: PTH111 -- see above
        is_name = "/" in word or word.endswith(".gguf")
        if is_name and any(str(one) in error.message for one in (word, path, path.resolve())):
            return word
    return None


def _is_wrong(word: str, error: AimGpuError) -> bool:
    """Whether the error is of this word, and not of what a file says."""
    return repr(word) in error.message and not isinstance(error, InvalidStackFile)


def _with_example(error: AimGpuError, words: Sequence[str], typed: str) -> str | None:
    """The hint, with a line that has the first of what it lists, or of what the message says it should be."""
    hint = error.hint or ""
    found = _LISTED.search(hint) or _SUCH_AS.search(error.message)
    if found is None or "`aimgpu" in hint:
        return error.hint
    example = found[1].rstrip(".;")
    if example in ("none", "nothing"):
        return f"{hint} `aimgpu run smollm2` starts one." if found[0].startswith(("Deployed", "Running")) else hint
    return f"{hint} For example `{_join(_put(words, typed, example))}`."


def _ask(lines: Sequence[Sequence[str]], question: str = "Did you mean one of these?") -> str:
    shown = [_join(line) for line in lines]
    return f"Did you mean `{shown[0]}`?" if len(shown) == 1 else "\n  ".join((question, *shown))


def _put(words: Sequence[str], typed: str, meant: str) -> list[str]:
    """The line with another word; a command of the same name stays."""
    return [words[0], *_replace(words[1:], typed, [meant])]


def _with_port(words: Sequence[str], port: str) -> list[str]:
    return [*_without(words, "--port"), "--port", port]


def _without(words: Sequence[str], option: str) -> list[str]:
    """The line less an option and its value."""
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if option not in (before, word) and not word.startswith(f"{option}=")]


def _line(error: click.ClickException, arguments: Sequence[str]) -> list[str] | None:
    """What should have been typed; None where nobody can tell."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return None
    context = error.ctx
    if isinstance(error, click.NoSuchCommand):
        return _with_command(error.command_name, context, arguments)
    if isinstance(error, click.NoSuchOption):
        return _with_option(error.option_name, context, arguments)
    if isinstance(error, click.BadParameter) and (typed := _INTEGER.search(error.message)) and typed[1] in arguments:
        number = int(typed[2]) * 1024 if typed[2] else int(re.sub("[,_]", "", typed[1]))
        return _replace(arguments, typed[1], [str(number)])
    if (word := _word_of_option(error)) is not None:
        return _with_word(arguments, *word)
    return _with_loose_words(error, context, arguments)


def _with_command(name: str, context: click.Context, arguments: Sequence[str]) -> list[str] | None:
    group = context.command
    known = group.list_commands(context) if isinstance(group, click.Group) else []
    if context.command.name == "partition" and name.partition("/")[0].upper() in _MODES:
        return _replace(arguments, name, ["apply", "gpu0", name.upper()])
    if context.command.name == "partition" and re.fullmatch(r"(?:gpu)?\d+", name):
        return _replace(arguments, name, ["apply", name])
    rest = arguments[arguments.index(name) + 1 :]
    if context.parent is None and name == "help":
        return [*rest, "--help"]
    others = _COMMANDS if context.parent is None else _SUBCOMMANDS
    plain = name.casefold()
    meant = [plain] if plain in known else others.get(plain, "").split()
    meant = ["ps"] if meant == ["size"] and not rest else meant
    if not meant and plain not in _NOTHING_LIKE_IT:
        meant = get_close_matches(plain, known, n=1)
    if not meant or meant[0] not in known:
        return None
    if meant[0] in _ALONE or len(meant) > 1:
        rest = [word for word in rest if word.startswith("-")]
    if meant == ["down"]:
        rest = [word for word in rest if word not in ("--all", "-a")]
    return [*arguments[: arguments.index(name)], *meant, *rest]


def _with_option(name: str, context: click.Context, arguments: Sequence[str]) -> list[str] | None:
    known = {option for parameter in context.command.params for option in parameter.opts}
    if name in ("--verbose", "--quiet", "-q") or (name == "--all" and context.command.name == "down"):
        return [word for word in arguments if word != name]
    others = (*_OPTIONS.get(name, "").split(), *get_close_matches(name, known, n=1, cutoff=0.75))
    meant = next((option for option in others if option in known), None)
    if name == "--once" and name in arguments:  # `top` goes on by itself, the others do not
        return _replace(arguments, name, ["--count", "1"] if context.command.name == "top" else [])
    if meant is None:
        return None
    given = next((word for word in arguments if word.partition("=")[0] == name), None)
    return _replace(arguments, given, [meant + given.removeprefix(name)]) if given is not None else None


def _with_stack(error: click.NoSuchOption, arguments: Sequence[str]) -> str | None:
    """What `run` and `up` have no option for, but a stack file has a key: such a file, then the line without the option."""
    name = error.option_name
    option, words = _OPTIONS.get(name, name), _without(arguments, name)
    place = next((number for number, word in enumerate(arguments) if word.partition("=")[0] == name), None)
    model = next((word for word in words[1:] if not word.startswith("-")), None)
    if words[0] not in ("run", "up") or option not in _IN_STACK or place is None or model is None:
        return None
    from aimgpu.cli.stack_source import parse_source, source_of_models  # noqa: PLC0415 -- seldom, and slow

    value = arguments[place].partition("=")[2] or "".join(arguments[place + 1 : place + 2])
    try:
        (entry,) = source_of_models((model,)).stack.deployments
        share = {} if option == "--gpu" else {"gpu": {option[2:]: _size(value) if option == "--memory" else value}}
        where = {"gpus": {"simulated": value}} if option == "--gpu" else {}
        text = json.dumps({**where, "models": {entry.name: {"model": entry.model, **share}}})
        parse_source(text, "the line", Path.cwd())
    except AimGpuError:
        return None
    rest = _replace(words[1:], model, [])
    up = _join(["up", "-f", "-", *(rest if words[0] == "up" else ("--attach", "--detach"))])
    return f"echo {shlex.quote(text)} | {up}" + (f" && {_join(words)}" if words[0] == "run" else "")


def _with_loose_words(error: click.UsageError, context: click.Context, arguments: Sequence[str]) -> list[str] | None:
    """Words that the command takes in another form: `resize chat 3 GB`, `chat code hello`, `size qwen3 8b`."""
    command, words = context.command.name, list(arguments)
    if command == "resize" and isinstance(error, click.MissingParameter) and len(words) in (3, 4):
        return [*words[:2], "--memory", _size("".join(words[2:]))]
    if command == "apply" and isinstance(error, click.MissingParameter) and words[-1].partition("/")[0].upper() in _MODES:
        return [*words[:-1], "gpu0", words[-1].upper()]
    if not error.message.startswith("Got unexpected extra argument") or len(words) < 3 or any(w.startswith("-") for w in words):  # noqa: PLR2004
        return None
    if command == "chat":
        return ["run", words[1], " ".join(words[2:])]
    return [words[0], " ".join(words[1:])] if command == "size" else None


def _size(typed: str) -> str:
    """Of `3`, `3 G` or `3GB` one that can be parsed."""
    try:
        parse_bytes(typed)
    except InvalidQuantity as error:
        meant = _NEAREST.match(error.hint or "")
        return meant[1] if meant else "4GiB"
    return typed


def _word_of_option(error: click.ClickException) -> tuple[str, str] | None:
    """Of an option that takes a few words: the one that was given, and the one that is meant, else the first."""
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    given = re.search(r"'([^']*)' is not one of", error.format_message())
    if not isinstance(kind, click.Choice) or given is None:
        return None
    choices, typed = [str(one) for one in kind.choices], given[1].casefold()
    meant = [_WORDS[typed]] if _WORDS.get(typed) in choices else get_close_matches(typed, choices, n=1)
    return given[1], (meant or choices)[0]


def _with_word(arguments: Sequence[str], typed: str, meant: str) -> list[str] | None:
    """Also where it was written as `--option=word`."""
    place = next((number for number, word in enumerate(arguments) if word == typed or word.endswith(f"={typed}")), None)
    if place is None:
        return None
    return [*arguments[:place], arguments[place].removesuffix(typed) + meant, *arguments[place + 1 :]]


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
