from pathlib import Path

import click

from aimgpu.cli.output import Column, examples, json_option, print_json, print_table
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile, read_catalogue_csv
from aimgpu.control.sizing_inputs.model_files import read_local_model
from aimgpu.errors import UnknownModel
from aimgpu.home import find_home
from aimgpu.sizing import Row, built_in, read_row
from aimgpu.sizing.catalogue import COLUMNS

_SETTABLE = tuple(name for name in COLUMNS if name not in ("id", "parameters"))


@click.group(epilog=examples("aimgpu catalogue list qwen", "aimgpu catalogue add acme/model --parameters 7B"))
def catalogue() -> None:
    """The models that are known by name; add your own."""


@catalogue.command("list", epilog=examples("aimgpu catalogue list", "aimgpu catalogue list llama --json"))
@click.argument("text", required=False, default="")
@click.option("--mine", is_flag=True, help="Only those that were added here.")
@json_option
def list_models(text: str, mine: bool, as_json: bool) -> None:
    """Models, those with TEXT in their name if given."""
    file = _file()
    rows = file.read() if mine else file.catalogue().rows
    found = [row for row in rows if text.casefold() in " ".join((row.facts.name, *row.aliases)).casefold()]
    if as_json:
        print_json({"models": [_to_json(row) for row in found]})
        return
    cells = [(row.facts.name, _count(row.facts.parameters), row.facts.precision, _context(row)) for row in found]
    print_table(["MODEL", Column("PARAMETERS", right=True), "PRECISION", Column("CONTEXT", right=True)], cells)


@catalogue.command(epilog=examples("aimgpu catalogue show Qwen/Qwen3-8B"))
@click.argument("model")
@json_option
def show(model: str, as_json: bool) -> None:
    """Everything that is known of MODEL, and where from."""
    known = _file().catalogue()
    row = next((row for row in known.rows if model.casefold() in _names(row)), None)
    if row is None:
        hint = built_in().remark(model) or "`aimgpu catalogue list` shows what is."
        raise UnknownModel(f"{model!r} is not in the catalogue", hint=hint, typed=model, near=known.near(model))
    facts = _to_json(row)
    if as_json:
        print_json(facts)
        return
    shape = facts.pop("architecture")
    lines = {**facts, **(shape if isinstance(shape, dict) else {})}
    print_table(["FACT", "VALUE"], [(name, str(value)) for name, value in lines.items() if value not in (None, 0, "", [], {})])


@catalogue.command(
    epilog=examples(
        "aimgpu catalogue add acme/model --parameters 7B",
        "aimgpu catalogue add acme/model --path ./models/acme",
        "aimgpu catalogue add acme/model --parameters 7B --set layers=32 --set hidden_size=4096 --set heads=32 ...",
    )
)
@click.argument("model")
@click.option("--parameters", help="Such as 7B.")
@click.option("--path", type=click.Path(path_type=Path), help="A folder or .gguf file to take the facts from.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another column, such as layers=32; again for more."
)
@json_option
def add(model: str, parameters: str | None, path: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Add MODEL to your own file, or replace it there."""
    if path and (parameters or settings):
        raise click.UsageError("--path has all the facts: give it without --parameters and --set")
    row = _row_from_path(model, path) if path else _row_from_options(model, parameters, settings)
    _file().add([row])
    _say({"added": model}, f"Added {model}.", as_json=as_json)


@catalogue.command("import", epilog=examples("aimgpu catalogue import models.csv"))
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def import_models(file: Path, as_json: bool) -> None:
    """Add the models of a CSV FILE (# begins a comment), all or none; columns id and parameters are needed."""
    rows = read_catalogue_csv(file)
    _file().add(rows)
    _say(
        {"added": [row.facts.name for row in rows]}, f"Added {len(rows)} model{'' if len(rows) == 1 else 's'}.", as_json=as_json
    )


@catalogue.command(epilog=examples("aimgpu catalogue remove acme/model"))
@click.argument("model")
@json_option
def remove(model: str, as_json: bool) -> None:
    """Remove MODEL from your own file; the package's own models stay."""
    _file().remove(model)
    _say({"removed": model}, f"Removed {model}.", as_json=as_json)


def _file() -> CatalogueFile:
    return CatalogueFile(find_home().catalogue_file)


def _row_from_path(model: str, path: Path) -> Row:
    facts = read_local_model(path)
    shape = _shape_json(Row(facts=facts))
    cells = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in shape.items() if value}
    return read_row(
        cells | {"id": model, "parameters": str(facts.parameters), "precision": facts.precision, "source": facts.source},
        "the new row",
    )


def _row_from_options(model: str, parameters: str | None, settings: tuple[str, ...]) -> Row:
    cells = {"id": model, "parameters": parameters or "", "source": "given by hand"}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise click.BadParameter(f"{setting!r} is not NAME=VALUE", param_hint="--set")
        if name.strip() not in _SETTABLE:
            raise click.BadParameter(f"there is no column {name.strip()!r}; known: {', '.join(_SETTABLE)}", param_hint="--set")
        cells[name.strip()] = value.strip()
    return read_row(cells, "the new row")


def _say(value: object, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def _names(row: Row) -> set[str]:
    return {name.casefold() for name in (row.facts.name, *row.aliases)}


def _to_json(row: Row) -> dict[str, object]:
    facts = row.facts
    return {
        "id": facts.name,
        "aliases": list(row.aliases),
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "precision": facts.precision,
        "memory_bytes": dict(facts.listed_memory),
        "source": facts.source,
        "architecture": _shape_json(row),
    }


def _shape_json(row: Row) -> dict[str, object]:
    shape = row.facts.architecture
    return {name: getattr(shape, name) for name in shape.__slots__} if shape else {}


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B"


def _context(row: Row) -> str:
    return str(row.facts.architecture.max_context) if row.facts.architecture else "?"
