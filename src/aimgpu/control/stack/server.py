"""What a stack file says of a server of the user's own: `engine: command`, or a preset of one."""

import re
import shlex
from pathlib import Path

from aimgpu.control.stack.overrides import read_arguments
from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Auto, ServerProgram, Want
from aimgpu.engines.command.presets import PRESETS, Preset
from aimgpu.units import parse_duration_ms

COMMAND = "command"
SERVER_KEYS = (COMMAND, "directory", "health", "models", "ready_timeout")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
_PLACEHOLDERS = ("port", "host", "model", "key", "memory_fraction")
_PATH = re.compile(r"/[!-~]{0,200}", re.ASCII)
_MOST_WORDS = 200
_MOST_MODELS = 100
_EXAMPLE = "[python, server.py, --port, '{port}']"


def read_server(fields: dict[str, YamlNode], want: Want, base_directory: Path | None) -> ServerProgram | None:
    """None where another engine serves. The program runs in `directory`, which counts from the stack file's folder."""
    name = fields["engine"].text(COMMAND) if "engine" in fields else None
    preset = PRESETS.get(name) if name else None
    if name != COMMAND and preset is None:
        key = next((key for key in SERVER_KEYS if key in fields), None)
        if key is not None:
            raise fields[key].complaint(f"{key!r} is for a server of your own", "Add `engine: command`, or remove it.")
        return None
    engine = fields["engine"]
    if isinstance(want, Auto):
        hint = "For example: gpu: {memory: 8GiB}; fraction, partition and whole do too."
        raise engine.complaint("nobody can size a server of your own: 'gpu' must say how much it gets", hint)
    if "adapters" in fields:
        raise fields["adapters"].complaint(f"'adapters' beside 'engine: {name}'", "vLLM and llama.cpp serve adapters.")
    ready_seconds = _read_timeout(fields.get("ready_timeout"))
    return ServerProgram(
        argv=_preset_command(preset, fields) if preset else _own_command(fields),
        directory=read_directory(fields.get("directory"), base_directory),
        health=_read_health(fields.get("health")),
        models=_read_models(fields.get("models")),
        ready_seconds=ready_seconds or (preset.ready_seconds if preset else None),
    )


def _own_command(fields: dict[str, YamlNode]) -> tuple[str, ...]:
    if COMMAND not in fields:
        raise fields["engine"].complaint("'engine: command' needs the command", f"For example: command: {_EXAMPLE}")
    if "args" in fields:
        raise fields["args"].complaint("'args' beside 'command'", "Write what the program takes into 'command'.")
    return _read_command(fields[COMMAND])


def _preset_command(preset: Preset, fields: dict[str, YamlNode]) -> tuple[str, ...]:
    """With the user's flags last."""
    if COMMAND in fields:
        raise fields[COMMAND].complaint("'command' beside a preset", "Write `engine: command`, or put flags under 'args'.")
    if "model" not in fields:
        raise fields["engine"].complaint("a preset needs the model", "For example: model: BAAI/bge-small-en-v1.5")
    added = read_arguments(fields.get("args"))
    again = next((flag for flag, *_ in added if flag in preset.fixed_flags()), None)
    if again is not None:
        raise fields["args"].complaint(f"the preset sets --{again} itself", "Write the whole command with `engine: command`.")
    return (*preset.argv, *(word for flag, *values in added for word in (f"--{flag}", *values)))


def read_directory(node: YamlNode | None, base_directory: Path | None) -> str | None:
    """Counts from the stack file's folder. None: of a stack that is not a file, where only a whole path says where."""
    directory = Path(node.text("./server")).expanduser() if node is not None else Path()
    if base_directory is not None:
        return str((base_directory / directory).absolute())
    return str(directory) if directory.is_absolute() else None


def read_words(node: YamlNode, example: str) -> list[str]:
    """A list of words, or one text that is split as a shell would, without being one."""
    words = [item.text(example) for item in node.items()]
    if len(words) == 1:
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            raise node.complaint(f"'command' cannot be split into words: {error}", f"For example: command: {example}") from None
    if not words or len(words) > _MOST_WORDS:
        raise node.complaint(f"'command' has {len(words)} words", f"It has from 1 to {_MOST_WORDS}.")
    return words


def _read_command(node: YamlNode) -> tuple[str, ...]:
    words = read_words(node, _EXAMPLE)
    found = {name for word in words for name in _PLACEHOLDER.findall(word)}
    for name in sorted(found.difference(_PLACEHOLDERS)):
        known = ", ".join(f"{{{one}}}" for one in _PLACEHOLDERS)
        raise node.complaint(f"'command' has the unknown placeholder {{{name}}}", f"Known: {known}.")
    if "port" not in found:
        raise node.complaint("'command' does not say where the port goes", f"For example: command: {_EXAMPLE}")
    return tuple(words)


def _read_health(node: YamlNode | None) -> str:
    path = node.text("/health") if node is not None else ServerProgram.HEALTH
    if node is not None and not _PATH.fullmatch(path):
        raise node.complaint(f"'health' cannot be {path[:60]!r}", "A path of the server, for example: health: /health")
    return path


def _read_models(node: YamlNode | None) -> tuple[str, ...]:
    names = tuple(item.text("bge-small") for item in node.items()) if node is not None else ()
    if node is not None and (len(set(names)) < len(names) or len(names) > _MOST_MODELS or max(map(len, names)) > _MOST_WORDS):
        raise node.complaint("'models' has a name twice, or too many", f"At most {_MOST_MODELS} names that the server knows.")
    return names


def _read_timeout(node: YamlNode | None) -> int | None:
    if node is None:
        return None
    milliseconds = node.quantity(parse_duration_ms, "5m")
    if milliseconds % 1000:
        raise node.complaint("'ready_timeout' must be whole seconds", "For example: ready_timeout: 5m")
    return milliseconds // 1000
