from json import dumps
from pathlib import Path

import click

from aimgpu.cli.home import find_home
from aimgpu.cli.output import Column, examples, json_option, print_json, print_table
from aimgpu.cli.wiring import find_device
from aimgpu.control.catalogue_file import CatalogueFile
from aimgpu.control.model_files import find_model_facts
from aimgpu.domain import Device
from aimgpu.errors import InvalidInput
from aimgpu.sizing import ModelFacts, SizingRequest
from aimgpu.sizing.profiles import PRECISIONS, Profile, aim_profile_id, make_profile, to_aim, to_json

_FORMATS = ("json", "aim", "both")


@click.group(epilog=examples("aimgpu profiles generate --gpu MI300X --out profiles"))
def profiles() -> None:
    """AIM profiles: what each model needs of a GPU, as files."""


@profiles.command(
    epilog=examples(
        "aimgpu profiles generate --gpu MI300X --out profiles",
        "aimgpu profiles generate --gpu MI355X --model Qwen/Qwen3-32B --precision fp16 --format aim --out profiles",
    )
)
@click.option("--gpu", help="A part such as MI300X. [the machine's own, else MI300X]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write into.")
@click.option("--model", "models", multiple=True, help="Only this model; again for more. [all of the catalogue]")
@click.option("--precision", "precisions", multiple=True, help="Again for more. [fp16, int8, int4]")
@click.option("--format", "form", type=click.Choice(_FORMATS), default="both", show_default=True, help="Ours, AMD's AIM, both.")
@click.option("--context", type=int, help="Tokens of one request. [8192, or what the model allows]")
@click.option("--concurrency", type=int, default=8, show_default=True)
@json_option
def generate(
    *,
    gpu: str | None,
    out: Path,
    models: tuple[str, ...],
    precisions: tuple[str, ...],
    form: str,
    context: int | None,
    concurrency: int,
    as_json: bool,
) -> None:
    """Write one profile per model and precision for a GPU; one that does not fit says so, and on how many it would."""
    device = find_device(gpu)
    made = [
        make_profile(SizingRequest(model=facts, precision=precision, context_tokens=context, concurrency=concurrency), device)
        for facts in _facts(models)
        for precision in precisions or PRECISIONS
    ]
    written = [_write(profile, out, form) for profile in made]
    _report(made, device, out, sum(written), as_json=as_json)


def _facts(models: tuple[str, ...]) -> list[ModelFacts]:
    catalogue = CatalogueFile(find_home().catalogue_file).catalogue()
    if not models:
        return [row.facts for row in catalogue.rows]
    return [find_model_facts(model, catalogue=catalogue) for model in models]


def _write(profile: Profile, out: Path, form: str) -> int:
    """How many files; AMD's format cannot say everything, and what it cannot is left out."""
    written = 0
    if form != "aim":
        out.mkdir(parents=True, exist_ok=True)
        (out / profile.file_name).write_text(dumps(to_json(profile), indent=2) + "\n")
        written += 1
    if form != "json":
        try:
            content = to_aim(profile)
        except InvalidInput:
            return written
        import yaml  # noqa: PLC0415 -- only this command writes YAML

        folder = out / "aim" / profile.facts.name.replace(":", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{aim_profile_id(profile)}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        written += 1
    return written


def _report(made: list[Profile], device: Device, out: Path, files: int, *, as_json: bool) -> None:
    fitting = sum(profile.partition is not None for profile in made)
    if as_json:
        print_json({"gpu": device.part, "profiles": len(made), "fit": fitting, "files": files, "out": out})
        return
    rows = [(profile.variant_id, f"{profile.footprint.total_bytes / 1e9:.2f}", _where(profile)) for profile in made]
    print_table(["PROFILE", Column("GB", right=True), f"ON {device.part}"], rows)
    click.echo(f"{len(made)} profiles, {fitting} fit on one {device.part}; {files} files in {out}")


def _where(profile: Profile) -> str:
    if profile.partition is not None:
        return f"{profile.partition.kind} of {profile.partition.layout}"
    return f"does not fit; on {profile.devices} it does" if profile.devices else "does not fit"
