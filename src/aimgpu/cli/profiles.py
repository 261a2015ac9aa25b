from collections.abc import Iterable
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
    content = [_aim_content(profile) for profile in made] if form != "json" else []
    if form == "aim" and made and not any(isinstance(aim, dict) for aim in content):
        raise InvalidInput(f"nothing can be written: {content[0]}", hint="Use --format json.")
    files = _write_json(made, out) if form != "aim" else 0
    files += _write_aim(zip(made, content, strict=False), out)
    left_out = sum(isinstance(aim, str) for aim in content)
    _report(made, device, {"files": files, "left_out_of_aim": left_out, "out": out}, as_json=as_json)


def _facts(models: tuple[str, ...]) -> list[ModelFacts]:
    catalogue = CatalogueFile(find_home().catalogue_file).catalogue()
    if not models:
        return [row.facts for row in catalogue.rows]
    return [find_model_facts(model, catalogue=catalogue) for model in models]


def _aim_content(profile: Profile) -> dict[str, object] | str:
    """In AMD's format, or why that cannot say it."""
    try:
        return to_aim(profile)
    except InvalidInput as error:
        return error.message


def _write_json(made: Iterable[Profile], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    for profile in made:
        (out / profile.file_name).write_text(dumps(to_json(profile), indent=2) + "\n")
        written += 1
    return written


def _write_aim(made: Iterable[tuple[Profile, dict[str, object] | str]], out: Path) -> int:
    import yaml  # noqa: PLC0415 -- only this command writes YAML

    written = 0
    for profile, content in made:
        if isinstance(content, dict):
            folder = out / "aim" / profile.facts.name.replace(":", "_")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{aim_profile_id(profile)}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
            written += 1
    return written


def _report(made: list[Profile], device: Device, written: dict[str, object], *, as_json: bool) -> None:
    fitting = sum(profile.partition is not None for profile in made)
    if as_json:
        print_json({"gpu": device.part, "profiles": len(made), "fit": fitting, **written})
        return
    rows = [(profile.variant_id, f"{_total_gb(profile):.2f}", _where(profile)) for profile in made]
    print_table(["PROFILE", Column("GB", right=True), f"ON {device.part}"], rows)
    click.echo(f"{len(made)} profiles, {fitting} fit on one {device.part}; {written['files']} files in {written['out']}")
    if written["left_out_of_aim"]:
        click.echo(f"{written['left_out_of_aim']} are not there in AMD's own format, which cannot say them.")


def _total_gb(profile: Profile) -> float:
    return profile.footprint.total_bytes * (profile.devices or 1) / 1e9


def _where(profile: Profile) -> str:
    if profile.partition is not None:
        return f"{profile.partition.kind} of {profile.partition.layout}"
    return f"does not fit; on {profile.devices} it does" if profile.devices else "does not fit"
