"""What a stack file says of a program: `programs: NAME`."""

from pathlib import Path

from aimgpu.control.stack.server import read_directory, read_words
from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Auto, RestartPolicy, UserProgram, Want

PROGRAM_KEYS = ("command", "directory", "restart")
_EXAMPLE = "[python, train.py]"


def read_program(node: YamlNode, fields: dict[str, YamlNode], want: Want, base_directory: Path | None) -> UserProgram:
    """It runs in `directory`, which counts from the stack file's folder."""
    if "command" not in fields:
        raise node.complaint(f"{node.key!r} does not say what to run", f"For example: command: {_EXAMPLE}")
    if isinstance(want, Auto):
        hint = "For example: gpu: {memory: 8GiB}; fraction, partition and whole do too."
        raise node.complaint("nobody can size a program: 'gpu' must say how much it gets", hint)
    return UserProgram(
        argv=tuple(read_words(fields["command"], _EXAMPLE)),
        directory=read_directory(fields.get("directory"), base_directory),
        restart=RestartPolicy(fields["restart"].choice(RestartPolicy)) if "restart" in fields else RestartPolicy.NEVER,
    )
