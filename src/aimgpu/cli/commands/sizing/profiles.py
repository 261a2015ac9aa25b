from collections.abc import Iterable, Mapping
from itertools import zip_longest
from json import dumps
from os import getpid
from pathlib import Path

import click

from aimgpu.cli.output import Column, examples, json_option, print_json, print_table
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Device
from aimgpu.errors import InvalidInput
from aimgpu.home import find_home
from aimgpu.sizing import ModelFacts, SizingRequest, built_in
from aimgpu.sizing.precision import PRECISIONS as ALL_PRECISIONS
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.profiles import PRECISIONS, Profile, aim_profile_id, make_profile, to_aim, to_json
from aimgpu.wiring import find_device

_FORMATS = ("json", "aim", "both")


@click.group(
    epilog=examples(
        "aimgpu profiles generate --gpu MI300X --out profiles", "aimgpu profiles show Qwen/Qwen3-32B-fp16 --gpu MI300X"
    )
)
def profiles() -> None:
    """AIM profiles: what each model needs of a GPU, as files."""


@profiles.command(
    epilog=examples(
        "aimgpu profiles generate --gpu MI300X --out profiles",
        "aimgpu profiles generate --gpu MI355X --model Qwen/Qwen3-32B --precision fp16 --format aim --out profiles",
    )
)
@click.option("--gpu", help="A product such as MI300X. [the machine's own, else MI300X]")
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
    wanted = dict.fromkeys(find_precision(precision).name for precision in precisions or PRECISIONS)
    made = [
        make_profile(SizingRequest(model=facts, precision=precision, context_tokens=context, concurrency=concurrency), device)
        for facts in _facts(models)
        for precision in wanted
    ]
    content = [_aim_content(profile) for profile in made] if form != "json" else []
    if form == "aim" and made and not any(isinstance(aim, dict) for aim in content):
        raise InvalidInput(f"nothing can be written: {content[0]}", hint="Use --format json.")
    texts = _to_write(made, content, form)
    _write(texts, out)
    left_out = sum(isinstance(aim, str) for aim in content)
    _report(made, device, {"files": len(texts), "left_out_of_aim": left_out, "out": out}, as_json=as_json)


@profiles.command(
    epilog=examples(
        "aimgpu profiles show Qwen/Qwen3-32B-fp16 --gpu MI300X",
        "aimgpu profiles show meta-llama/Llama-3.1-8B-Instruct-int4 --json",
    )
)
@click.argument("variant")
@click.option("--gpu", help="A product such as MI300X. [the machine's own, else MI300X]")
@click.option("--context", type=int, help="Tokens of one request. [8192, or what the model allows]")
@click.option("--concurrency", type=int, default=8, show_default=True)
@json_option
def show(variant: str, gpu: str | None, context: int | None, concurrency: int, as_json: bool) -> None:
    """Print the profile of VARIANT: a model of the catalogue and a precision, as MODEL-PRECISION."""
    facts, precision = _variant(variant)
    request = SizingRequest(model=facts, precision=precision, context_tokens=context, concurrency=concurrency)
    profile = make_profile(request, find_device(gpu))
    if as_json:
        print_json(to_json(profile))
        return
    click.echo(f"{profile.variant_id}: {profile.memory_requirement_gb:.2f} GB, {_where(profile)} ({profile.device.product})")
    click.echo(f"{profile.footprint.engine} arguments, for {profile.meant_for}:")
    for flag, value in profile.footprint.flags.items():
        click.echo(f"  {flag} {value}".rstrip())
    for note in profile.footprint.notes:
        click.echo(f"Note: {note}")


def _variant(variant: str) -> tuple[ModelFacts, str]:
    """Raises InvalidInput where it does not end in a precision, and UnknownModel."""
    model, dash, precision = variant.rpartition("-")
    known = {name.lower(): name for name in (*PRECISIONS, *ALL_PRECISIONS)}
    if not dash or not model or precision.lower() not in known:
        near = [f"{model}-{PRECISIONS[0]}" for model in built_in().near(variant)]
        hint = f"Write MODEL-PRECISION with one of {', '.join(PRECISIONS)}."
        raise InvalidInput(f"{variant!r} is not a model and a precision", hint=hint, typed=variant, near=near)
    return _facts((model,))[0], known[precision.lower()]


def _facts(models: tuple[str, ...]) -> list[ModelFacts]:
    catalogue = CatalogueFile(find_home().catalogue_file).catalogue()
    if not models:
        return [row.facts for row in catalogue.rows]
    found = [find_model_facts(model, catalogue=catalogue) for model in models]
    return list({facts.name: facts for facts in found}.values())


def _aim_content(profile: Profile) -> dict[str, object] | str:
    """In AMD's format, or why that cannot say it."""
    try:
        return to_aim(profile)
    except InvalidInput as error:
        return error.message


def _to_write(made: Iterable[Profile], content: list[dict[str, object] | str], form: str) -> dict[Path, str]:
    """The text of every file by its path under the folder; refuses two profiles that would be one file."""
    import yaml  # noqa: PLC0415 -- only this command writes YAML

    owners: dict[Path, str] = {}
    texts: dict[Path, str] = {}
    for profile, aim in zip_longest(made, content):
        files = {Path(profile.file_name): dumps(to_json(profile), indent=2) + "\n"} if form != "aim" else {}
        if isinstance(aim, dict):
            files[_aim_path(profile)] = f"# engine_args are for {profile.meant_for}\n" + yaml.safe_dump(aim, sort_keys=False)
        for path, text in files.items():
            if owners.setdefault(path, profile.variant_id) != profile.variant_id:
                raise InvalidInput(
                    f"{owners[path]} and {profile.variant_id} would both be {path}",
                    hint="Write them into two folders: --model takes one.",
                )
            texts[path] = text
    return texts


def _aim_path(profile: Profile) -> Path:
    """Below the folder, also for a model that was given by the path of its files."""
    name = profile.facts.name
    is_path = name.startswith(("/", ".", "~")) or name.lower().endswith(".gguf")
    return Path("aim") / (Path(name).resolve().name if is_path else name.replace(":", "_")) / f"{aim_profile_id(profile)}.yaml"


def _write(texts: Mapping[Path, str], out: Path) -> None:
    """Each file whole or not at all."""
    for path, text in texts.items():
        target = out / path
        scratch = target.with_name(f".{getpid()}.new")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                scratch.write_text(text, encoding="utf-8")
                scratch.replace(target)
            finally:
                scratch.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"cannot write {target}: {error.strerror}", hint="Give --out a folder that can be written and has room."
            ) from error


def _report(made: list[Profile], device: Device, written: dict[str, object], *, as_json: bool) -> None:
    fitting = sum(profile.partition is not None for profile in made)
    if as_json:
        print_json({"gpu": device.product, "profiles": len(made), "fit": fitting, **written})
        return
    rows = [(profile.variant_id, f"{profile.memory_requirement_gb:.2f}", _where(profile)) for profile in made]
    print_table(["PROFILE", Column("GB", right=True), f"ON {device.product}"], rows)
    click.echo(f"{len(made)} profiles, {fitting} fit on one {device.product}; {written['files']} files in {written['out']}")
    if written["left_out_of_aim"]:
        click.echo(f"{written['left_out_of_aim']} are not there in AMD's own format, which cannot say them.")


def _where(profile: Profile) -> str:
    if profile.partition is not None:
        return f"{profile.partition.kind} of {profile.partition.layout}"
    return f"does not fit; on {profile.devices} it does" if profile.devices else "does not fit"
