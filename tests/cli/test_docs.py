import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aimgpu.cli.main import cli
from aimgpu.cli.registry import command_names
from aimgpu.control.stack import place as stackfile_place
from aimgpu.control.stack import queue as stackfile_queue
from aimgpu.control.stack import slo as stackfile_slo
from aimgpu.control.stack import stack_file as stackfile
from aimgpu.control.stack.stack_file import parse_stack

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"(?:^ {4}|`)(?:\.venv/bin/)?(aimgpu [a-z].*?)(?:`|  +#|$)", re.MULTILINE)
STACK_PAGE = ROOT / "docs" / "reference" / "stack-file.md"


def commands_on(page: Path) -> Iterator[list[str]]:
    for found in COMMAND.finditer(page.read_text()):
        yield found[1].partition(" | ")[0].split()[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_stack_files_in_the_docs_are_valid(page: Path) -> None:
    for text in re.findall(r"```yaml\n(gpus:.*?|queue:.*?|models:.*?|programs:.*?)```", page.read_text(), re.DOTALL):
        assert parse_stack(text).deployments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_exist_with_their_options(page: Path) -> None:
    context = click.Context(cli, info_name="aimgpu")
    for words in commands_on(page):
        assert words[0] in command_names(), words
        command = cli.get_command(context, words[0])
        if isinstance(command, click.Group) and len(words) > 1:
            command = command.commands.get(words[1])
        assert command is not None, words
        own = words[: words.index("--")] if "--" in words else words  # what follows is a program's
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        assert {word for word in own if word.startswith("-") and len(word) > 1} <= known, words


def test_every_key_of_the_stack_file_is_on_its_page() -> None:
    text = STACK_PAGE.read_text()
    keys = (
        *stackfile._MODEL_KEYS,
        *stackfile._WANT_KEYS,
        *stackfile_slo.SLO_KEYS,
        "gpus",
        "simulated",
        "count",
        "devices",
        "queue",
    )
    for key in (*keys, *stackfile_place.PLACE_KEYS, *stackfile_place.HOST_KEYS, *stackfile_queue.QUEUE_KEYS):
        assert f"`{key}`" in text or f"{{{key}:" in text or f", {key}:" in text or f"`{key}: " in text, key
