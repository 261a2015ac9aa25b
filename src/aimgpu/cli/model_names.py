"""Models as people type them: a short name becomes what can be fetched and read here, a typo or a family is asked about."""

from collections.abc import Iterator, Mapping, Sequence

import click

from aimgpu.control.plan.preparation import are_simulated, readers
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.model_names import choose_form, is_short_name, near_models
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.engines.protocols import Engine
from aimgpu.errors import AimGpuError, UnknownModel
from aimgpu.files import cache_directory
from aimgpu.home import find_home
from aimgpu.sizing.catalogue import resolve
from aimgpu.wiring import choose_hardware, has_gpu, make_engines, make_model_store


def understand_model(typed: str) -> str:
    """What to deploy; said on stderr where it is not what was typed. Raises UnknownModel with lines to paste."""
    if not is_short_name(typed) or make_model_store().find(typed) is not None:
        return typed
    engines = engines_here()
    formats = readers(engines.values(), simulated=are_gpus_simulated())
    catalogue = CatalogueFile(find_home().catalogue_file).catalogue()
    row = catalogue.row(typed) or resolve(catalogue.rows, typed)
    if row is not None:
        meant = choose_form(row, formats).model
        click.echo(f"{typed} is taken as {meant}.", err=True)
        return meant
    if not formats and any(not engine.formats and engine.availability().available for engine in engines.values()):
        return typed  # Ollama alone is here: it knows names that nobody else does
    hint = catalogue.remark(typed) or ask_about(near_models(catalogue, typed, formats))
    raise UnknownModel(f"there is no model {typed!r}", hint=hint)


def engines_here() -> Mapping[str, Engine]:
    """Best first, whether or not they are installed."""
    return make_engines(make_model_store(), cache_directory(), has_gpu=has_gpu())


def are_gpus_simulated() -> bool:
    """Whether `aimgpu up` would simulate a GPU here."""
    try:
        return are_simulated(choose_hardware(GpuChoice(), find_home()).read_devices())
    except AimGpuError:
        return False  # a GPU that cannot be used, which is reported when it is to be


def ask_about(near: Sequence[str]) -> str:
    """The running command again, with each of these."""
    if not near:
        return (
            "Give any part of a name that `aimgpu catalogue list` shows, a repository of the Hugging Face hub (org/name), "
            "or the path of a .gguf file."
        )
    lines = list(_commands(near))
    return f"Did you mean `{lines[0]}`?" if len(lines) == 1 else "\n  ".join(("Did you mean one of these?", *lines))


def _commands(models: Sequence[str]) -> Iterator[str]:
    """With the command that is running."""
    context = click.get_current_context(silent=True)
    command = context.command_path if context is not None else "aimgpu run"
    return (f"{command} {model}" for model in models)
