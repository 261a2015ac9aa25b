"""Models as people type them: a short name becomes what can be fetched and read here, a typo or a family is asked about."""

from collections.abc import Mapping

import click

from aimgpu.control.plan.preparation import are_simulated, readers
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.model_names import choose_form, is_short_name, near_models, plain_name
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.engines.protocols import Engine
from aimgpu.errors import AimGpuError, UnknownModel
from aimgpu.files import cache_directory
from aimgpu.home import find_home
from aimgpu.sizing.catalogue import resolve
from aimgpu.wiring import choose_hardware, has_gpu, make_engines, make_model_store

_NAMES = (
    "Give any part of a name that `aimgpu catalogue list` shows, a repository of the Hugging Face hub (org/name), or the path "
    "of a .gguf file. `aimgpu run smollm2` needs no download."
)


def understand_model(typed: str) -> str:
    """What to deploy; said on stderr where it is not what was typed. Raises UnknownModel with lines to paste."""
    typed = plain_name(typed)
    if not is_short_name(typed) or make_model_store().find(typed) is not None:
        return typed
    engines = engines_here()
    formats = readers(engines.values(), simulated=are_gpus_simulated())
    catalogue = CatalogueFile(find_home().catalogue_file).catalogue()
    plain = typed.removesuffix(":latest")
    row = catalogue.row(plain) or resolve(catalogue.rows, plain)
    if row is not None:
        meant = choose_form(row, formats).model
        click.echo(f"{typed} is taken as {meant}.", err=True)
        return meant
    if not formats and any(not engine.formats and engine.availability().available for engine in engines.values()):
        return typed  # Ollama alone is here: it knows names that nobody else does
    remark = catalogue.remark(typed)
    near = () if remark else near_models(catalogue, typed, formats)
    raise UnknownModel(f"there is no model {typed!r}", hint=remark or _NAMES, typed=typed, near=near)


def engines_here() -> Mapping[str, Engine]:
    """Best first, whether or not they are installed."""
    return make_engines(make_model_store(), cache_directory(), has_gpu=has_gpu())


def are_gpus_simulated() -> bool:
    """Whether `aimgpu up` would simulate a GPU here."""
    try:
        return are_simulated(choose_hardware(GpuChoice(), find_home()).read_devices())
    except AimGpuError:
        return False  # a GPU that cannot be used, which is reported when it is to be
