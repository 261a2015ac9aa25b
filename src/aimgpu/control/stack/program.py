"""What a stack file says of a program: `programs: NAME`."""

from collections.abc import Iterable
from pathlib import Path

from aimgpu.control.stack.server import read_directory, read_words
from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Auto, Deployment, RestartPolicy, UserProgram, Want

PROGRAM_KEYS = ("command", "directory", "restart", "after", "preemptible")
_NEVER_IDLE_SECONDS = 10**9  # it makes room for others, but does not fall asleep by itself
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
        after=tuple(dict.fromkeys(item.text("prepare") for item in fields["after"].items())) if "after" in fields else (),
    )


def read_keep_seconds(fields: dict[str, YamlNode]) -> int | None:
    """None: it keeps its room. Else it makes room as a model does that may sleep."""
    preemptible = "preemptible" in fields and fields["preemptible"].choice(("true", "false")) == "true"
    return _NEVER_IDLE_SECONDS if preemptible else None


def find_unreachable(deployments: Iterable[Deployment]) -> tuple[str, str] | None:
    """A program that could never start, by its name, and why: it comes after what is not there, or after itself."""
    after = {one.name: one.overrides.program.after if one.overrides.program else () for one in deployments}
    for name, names in after.items():
        seen, ahead = {name}, list(names)
        while ahead:
            other = ahead.pop()
            if other == name:
                return name, f"{name!r} comes after itself"
            if other not in after:
                return name, f"{name!r} comes after {other!r}, which is not in this file"
            if other not in seen:
                seen.add(other)
                ahead += after[other]
    return None
