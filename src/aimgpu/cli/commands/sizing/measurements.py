from datetime import UTC, datetime

import click

from aimgpu.cli.output import Column, examples, json_option, print_json, print_table
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.errors import UnknownModel, suggest_nearest
from aimgpu.home import find_home
from aimgpu.sizing.correction import Measurement, kind_of, learn, to_json
from aimgpu.units import format_bytes


@click.group(epilog=examples("aimgpu measurements list", "aimgpu measurements forget Qwen/Qwen3-8B"))
def measurements() -> None:
    """What models were measured to take, beside the estimate; it corrects later estimates."""


@measurements.command("list", epilog=examples("aimgpu measurements list", "aimgpu measurements list --json"))
@json_option
def list_measurements(as_json: bool) -> None:
    """Every term that was measured, and by how much its estimate is multiplied now."""
    known = _file().read()
    if as_json:
        print_json({"measurements": to_json(known)})
        return
    if not known:
        click.echo("Nothing was measured yet: a model that ran on a real GPU leaves what it took here.")
        return
    numbers = [Column(name, right=True) for name in ("ESTIMATED", "MEASURED", "NOW")]
    print_table(["MODEL", "ENGINE", "GPU", "TERM", *numbers, "WHEN"], [_row(one, known) for one in known])


@measurements.command(epilog=examples("aimgpu measurements forget Qwen/Qwen3-8B"))
@click.argument("model")
@json_option
def forget(model: str, as_json: bool) -> None:
    """Undo what was learned from runs of MODEL."""
    file = _file()
    count = file.forget_model(model)
    if not count:
        names = sorted({one.model for one in file.read()})
        question = suggest_nearest([model], names)
        raise UnknownModel(f"nothing was measured of {model!r}", hint=f"{question}Measured: {', '.join(names) or 'nothing'}.")
    if as_json:
        print_json({"forgotten": count})
    else:
        click.echo(f"Forgot {count} measurements of {model}.")


def _file() -> MeasurementFile:
    return MeasurementFile(find_home().measurements_file)


def _row(one: Measurement, known: tuple[Measurement, ...]) -> tuple[str, ...]:
    correction = learn(known, kind_of(one)).get(one.term)
    factor = f"x {correction.ppm / 1e6:.2f}" if correction else ""
    sizes = (format_bytes(one.estimated_bytes), format_bytes(one.measured_bytes))
    engine = f"{one.engine} {one.engine_version or ''}".strip()
    when = datetime.fromtimestamp(one.at, tz=UTC).isoformat(timespec="minutes")
    return (one.model, engine, one.gpu, one.term, *sizes, factor, when)
