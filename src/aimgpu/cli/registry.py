"""Every command, by section: where it lives and the line that `aimgpu --help` shows.

Nothing here is imported before its command is called, so `--help` stays fast. To add a command, add a line to a section;
the attribute must be a click command that takes `--json` (`output.json_option`) and has examples (`output.examples`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    target: str  # "module:attribute"
    help: str


SECTIONS: dict[str, dict[str, Entry]] = {
    "Serve models": {},
    "Look at GPUs": {},
    "Size models": {},
    "Decide": {},
    "Watch": {},
    "This command": {
        "completion": Entry("aimgpu.cli.completion:completion", "Print the completion script of a shell."),
        "version": Entry("aimgpu.cli.version:version", "Say which version this is."),
    },
}


def find_entry(name: str) -> Entry | None:
    return next((entries[name] for entries in SECTIONS.values() if name in entries), None)


def command_names() -> list[str]:
    """In the order of the help."""
    return [name for entries in SECTIONS.values() for name in entries]
