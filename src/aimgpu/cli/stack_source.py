"""Where a command's stack comes from: a file, names of models on the command line, or the built-in example."""

import re
import shlex
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from json import dumps
from pathlib import Path

import click

from aimgpu.control.stack.stack_file import LARGEST_FILE, Stack, decode_stack, parse_stack, read_stack_text
from aimgpu.errors import InvalidInput, InvalidStackFile
from aimgpu.hardware.simulated import find_product

DEFAULT_FILES = ("stack.yaml", "stack.yml")
EXAMPLE = """\
# Three models on one GPU.
models:
  chat: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 4096, concurrency: 2,
         gpu: {memory: 2GiB}, priority: high, slo: {ttft_p95: 2s, availability: 99.5%}}
  code: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 2048,
         gpu: {memory: 2GiB}, compute: 30%, priority: medium}
  small: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 1024, gpu: auto, priority: low, keep: 30m}
"""
_SMALLEST = "models: {chat: {model: smollm2}}"
_FILE_ENDINGS = (".yaml", ".yml")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class StackText:
    """A stack as written, and as understood."""

    text: str
    base_directory: Path
    stack: Stack


def read_source(file: Path | None) -> StackText:
    """The stack named, or that of this folder; a mistake in it is reported before anything starts."""
    if file is not None and str(file) == "-":
        return parse_source(_read_stdin(), "stdin", Path.cwd())
    path = file or _find_default()
    if not path.exists():
        near = _files_like(path)
        quoted = shlex.quote(str(path if path.parent.is_dir() else path.name))
        write = f"`echo '{_SMALLEST}' > {quoted}` writes the smallest; `aimgpu up --example` needs none."
        hint = f"Did you mean `--file {shlex.quote(near[0])}`?" if near else write
        raise InvalidStackFile(f"there is no file {path}", hint=hint)
    return parse_source(read_stack_text(path), str(path), path.absolute().parent)


def choose_source(file: Path | None, models: tuple[str, ...], *, example: bool) -> StackText:
    """The stack of the models, the example or a file, of which at most one may be named."""
    if sum((file is not None, bool(models), example)) > 1:
        raise InvalidInput("a stack file, models and --example exclude each other", hint="Give one of them.")
    if example:
        return parse_source(EXAMPLE, "the example", Path.cwd())
    if len(models) == 1 and models[0].casefold().endswith(_FILE_ENDINGS):
        return read_source(Path(models[0]))
    return source_of_models(models) if models else read_source(file)


def source_of_models(models: tuple[str, ...]) -> StackText:
    """A stack of models that are sized by themselves; each is `MODEL`, or `NAME=MODEL`."""
    from aimgpu.cli.model_names import understand_model  # noqa: PLC0415 -- a third of a second, which a file does not need

    named: dict[str, str] = {}
    for given in models:
        name, separator, model = given.partition("=")
        if not separator:
            name, model = name_of(given), given
        if not name or not model:
            raise InvalidInput(f"{given!r} names no model", hint="Write MODEL, or NAME=MODEL.")
        model = understand_model(model)
        if name in named:
            raise InvalidInput(f"two models would be called {name!r}", hint="Write NAME=MODEL for one of them.")
        named[name] = model
    text = "models:\n" + "".join(f"  {dumps(name)}: {{model: {dumps(model)}}}\n" for name, model in named.items())
    return parse_source(text, "the command line", Path.cwd())


def name_of(model: str) -> str:
    """What callers will name it: `Qwen/Qwen3-4B` is `Qwen3-4B`, `models/tiny.gguf` is `tiny`, `qwen3:4b` is `qwen3-4b`."""
    last = model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return _FORBIDDEN.sub("-", last).strip("-._")[:_LONGEST_NAME]


def parse_source(text: str, source: str, base_directory: Path) -> StackText:
    """The stack with where it came from."""
    stack = parse_stack(text, source=source, base_directory=base_directory, check_product=find_product)
    return StackText(text=text, base_directory=base_directory, stack=stack)


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise InvalidStackFile(
            f"stdin has more than {LARGEST_FILE} bytes", hint="A stack file is text of a few lines per model."
        )
    return decode_stack(data, "stdin")


def _files_like(path: Path) -> list[str]:
    """Stack files beside it with a name like it."""
    there = [each.name for each in path.parent.glob("*") if each.suffix.casefold() in _FILE_ENDINGS]
    return [str(path.parent / name) for name in get_close_matches(path.name, there)]


def _find_default() -> Path:
    for name in DEFAULT_FILES:
        if Path(name).is_file():
            return Path(name)
    context = click.get_current_context(silent=True)
    command = context.command_path if context is not None else "aimgpu up"
    lines = {
        f"{command} --example": "three small models, to see how it works",
        f"{command} smollm2": "a model by its name, or the path of a .gguf file",
        f"echo '{_SMALLEST}' > stack.yaml": "the smallest stack file; --file names another",
    }
    if command != "aimgpu up":
        del lines[f"{command} --example"]
    width = max(map(len, lines))
    raise InvalidStackFile(
        f"nothing to serve: no model was named, and there is no stack.yaml in {Path.cwd()}",
        hint="\n  ".join(("One of these:", *(f"{line:{width}}  # {what}" for line, what in lines.items()))),
    )
