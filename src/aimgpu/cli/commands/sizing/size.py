import shlex
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path

import click

from aimgpu.cli.model_names import are_gpus_simulated, engines_here
from aimgpu.cli.options import gpu_option
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.sizing_basis import own_basis
from aimgpu.cli.views.size import fit_lines, flag_line, footprint_json, saving_lines, waterfall
from aimgpu.control.plan.preparation import formats_of, readers, suited_engines
from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.control.sizing_inputs.model_names import as_gguf, is_path, is_short_name, plain_name
from aimgpu.domain import Device
from aimgpu.domain.codec import encode
from aimgpu.engines.models.hub import GGUF
from aimgpu.engines.models.packaged import find_packaged
from aimgpu.engines.protocols import LocalModel
from aimgpu.errors import InvalidInput, UnknownDeployment, UnknownModel
from aimgpu.hardware.known_gpus import is_known
from aimgpu.home import find_home, last_run
from aimgpu.sizing import ENGINES, Catalogue, SizingRequest, estimate_footprint, parse_parameter_count
from aimgpu.sizing.catalogue import resolve
from aimgpu.sizing.engines.table import ENGINE_SIZINGS
from aimgpu.sizing.fits import find_fits, find_savings
from aimgpu.sizing.request import MOST_DEVICES
from aimgpu.sizing.surplus import describe_service, spend_surplus
from aimgpu.units import MIB, format_bytes, parse_bytes
from aimgpu.wiring import find_device, make_model_store

_ROOM = 1.1  # times what it took
_FULL = 0.99  # of a share: it may have wanted more


@click.command(
    epilog=examples(
        "aimgpu size Qwen/Qwen2.5-7B-Instruct",
        "aimgpu size meta-llama/Llama-3.3-70B-Instruct --gpu MI300X --precision int4 --context 8192 --concurrency 8",
        'aimgpu size qwen3:8b --gpu "RTX 4090"',
        "aimgpu size ./models/smollm2.gguf --json",
        "aimgpu size acme/new-model --parameters 7B",
        "aimgpu size --from-run train   # after `aimgpu exec --name train`",
    )
)
@click.argument("model", required=False)
@gpu_option('A product such as MI300X or "RTX 4090". [the machine\'s own, else MI300X]')
@click.option("--engine", type=click.Choice(ENGINES), help="The program that serves it. [the one that would run here]")
@click.option("--engine-version", help="Memory differs between versions. [the installed one, else current]")
@click.option("--precision", help="fp16, bf16, fp8, int8, int4, mxfp4, q4_k_m, ... [as published]")
@click.option("--kv-precision", help="Of the KV cache: bf16, fp8, q8_0, q4_0. [16 bits]")
@click.option("--context", type=int, help="Tokens of one request, prompt and answer. [8192, or what the model allows]")
@click.option("--concurrency", type=int, help="Requests at once, each with its whole context. [the engine's own]")
@click.option("--prompt-tokens", type=int, help="The longest prompt; matters where it is prefilled in one piece. [the context]")
@click.option("--batched-tokens", type=int, help="Tokens computed at once: vLLM's --max-num-batched-tokens, llama.cpp's -ub.")
@click.option("--flash-attention/--no-flash-attention", default=None, help="As the engine will run. [on in llama.cpp]")
@click.option("--memory", help="Of a grant, such as 96GiB: what is more than the need goes to the KV cache where it can.")
@click.option("--tensor-parallel", type=int, default=1, show_default=True, help="GPUs that one copy is split over.")
@click.option("--parameters", help="Size of a model that nothing else is known of, such as 7B.")
@click.option("--from-run", metavar="NAME", help="Instead of MODEL: what the last run of this program took.")
@json_option
def size(
    model: str | None,
    *,
    from_run: str | None,
    gpu: str | None,
    engine: str | None,
    engine_version: str | None,
    precision: str | None,
    kv_precision: str | None,
    context: int | None,
    concurrency: int | None,
    prompt_tokens: int | None,
    batched_tokens: int | None,
    flash_attention: bool | None,
    memory: str | None,
    tensor_parallel: int,
    parameters: str | None,
    as_json: bool,
) -> None:
    """What MODEL needs, term by term, and where it fits.

    MODEL is a name of the catalogue, a folder with config.json and safetensors, or a .gguf file (a path begins with / or ./).
    """
    if from_run is not None and model is None:
        _show_last_run(from_run, as_json=as_json)
        return
    if model is None or from_run is not None:
        line = shlex.join(["aimgpu", "size", "smollm2", *(("--gpu", gpu) if gpu else ())])
        raise InvalidInput("size takes a MODEL, or --from-run", hint=f"For example `{line}`.")
    if engine_version is not None and not any(character.isdigit() for character in engine_version):
        raise InvalidInput(
            f"{engine_version!r} is not a version", hint="Write it as the engine prints it, such as 0.11.0 or b9272."
        )
    typed, model = model, plain_name(model)
    subject = _understand(model, engine, here=gpu is None)
    count = parse_parameter_count(parameters) if parameters else None
    model, engine = subject.model, subject.engine
    basis = own_basis([engine])
    if count is None and subject.path is None and basis.catalogue().find(model) is None:
        config = make_model_store().find_config(model, fetch=True)
        subject = replace(subject, path=config.path) if config else subject
    if count is None and subject.path is None and basis.catalogue().find(model) is None and is_known(model):
        line = shlex.join(["aimgpu", "size", "smollm2", "--gpu", model])
        raise UnknownModel(f"{model!r} is a GPU", hint=f"Name a model too, as in `{line}`.")
    if count is None and subject.path is None and (near := _near(basis.catalogue(), model)):
        raise UnknownModel(f"nothing is known of the model {model!r}", typed=typed, near=near)
    name = basis.catalogue_name(model, engine)
    facts = find_model_facts(name, subject.path, parameters=count, catalogue=basis.catalogue())
    device = find_device(gpu)
    request = SizingRequest(
        model=facts,
        engine=engine,
        engine_version=engine_version or basis.versions.get(engine),
        precision=precision,
        kv_precision=kv_precision,
        context_tokens=context,
        concurrency=1 if concurrency is None else concurrency,
        prompt_tokens=prompt_tokens,
        batched_tokens=batched_tokens,
        flash_attention=flash_attention,
        tensor_parallel=tensor_parallel,
        vendor=device.vendor,
        gpu=device.product,
        device_memory_bytes=device.memory_bytes,
    )
    if concurrency is None:
        request = ENGINE_SIZINGS[engine].own_concurrency(request)
    if not request.can_divide(tensor_parallel):
        fitting = ", ".join(str(count) for count in range(1, MOST_DEVICES + 1) if request.can_divide(count))
        raise InvalidInput(
            f"{engine} will refuse {tensor_parallel} devices: the heads of {model} cannot be divided by it",
            hint=f"Give --tensor-parallel one of {fitting}.",
        )
    notes = (*subject.remarks, *basis.notes)
    _print(basis.corrected(request), notes, device, granted_bytes=_granted(memory, device), as_json=as_json)


def _near(catalogue: Catalogue, model: str) -> tuple[str, ...]:
    """Models that may be meant by a name that the catalogue does not have."""
    known = is_path(model) or find_packaged(model) is not None or catalogue.find(model) is not None
    return () if known or catalogue.remark(model) else catalogue.near(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is sized, for which engine, and why."""

    model: str
    engine: str
    path: Path | None
    remarks: tuple[str, ...]


def _understand(typed: str, engine: str | None, *, here: bool) -> _Subject:
    """The model as typed, for the engine that would run here unless an engine or another GPU is named."""
    catalogue = own_basis(()).catalogue()
    local = make_model_store().find(typed)
    unknown = local is None and is_short_name(typed) and not catalogue.find(typed)
    row = resolve(catalogue.rows, typed.removesuffix(":latest")) if unknown else None
    model = row.facts.name if row else typed
    remarks: tuple[str, ...] = (f"{typed} is taken as {model}",) if row else ()
    if engine is None:
        formats = formats_of(model, local)
        engine = "llamacpp" if formats == {GGUF} or model.endswith(".gguf") else "vllm"
        if here:
            engine, remark = _engine_here(model, local, engine)
            remarks = (*remarks, remark) if remark else remarks
    read = local is not None and local.format in engines_here()[engine].formats
    return _Subject(model=model, engine=engine, path=local.path if local and read else None, remarks=remarks)


def _engine_here(model: str, local: LocalModel | None, otherwise: str) -> tuple[str, str | None]:
    """What `aimgpu up` would choose; where nothing that runs here reads such files, `otherwise`, and what to size instead."""
    engines, simulated = engines_here().values(), are_gpus_simulated()
    runnable = readers(engines, simulated=simulated)
    suited = [name for name in suited_engines(engines, model, local, simulated=simulated) if name in runnable]
    if suited:
        return suited[0], None
    twin = as_gguf(model) if runnable else None
    return otherwise, f"{otherwise} does not run on this machine" + (f"; `aimgpu size {twin}` is what would" if twin else "")


def _granted(memory: str | None, device: Device) -> int | None:
    if memory is None:
        return None
    granted = parse_bytes(memory)
    if granted > device.memory_bytes:
        raise InvalidInput(
            f"{format_bytes(granted)} is more than one {device.product} has, {format_bytes(device.memory_bytes)}",
            hint="Give --memory at most that, or another --gpu.",
            typed=memory,
            near=[format_bytes(device.memory_bytes)],
        )
    return granted


def _print(request: SizingRequest, notes: tuple[str, ...], device: Device, *, granted_bytes: int | None, as_json: bool) -> None:
    need = footprint = estimate_footprint(request)
    if granted_bytes is not None:
        if granted_bytes < footprint.total_bytes:
            notes = (*notes, f"{format_bytes(granted_bytes)} is less than the need: this shows the need")
        footprint = spend_surplus(footprint, granted_bytes)
    service = describe_service(footprint, max(granted_bytes or 0, footprint.total_bytes))
    footprint = replace(footprint, notes=(*footprint.notes, *notes))
    fits = find_fits(request, device, granted_bytes=granted_bytes or 0)
    savings = find_savings(request, device)
    if as_json:
        print_json(footprint_json(footprint, request.model.source, fits, savings, device) | {"service": encode(service)})
        return
    most = "up to " if request.sequences else ""  # more than the KV cache holds whole contexts
    requests = f"{most}{footprint.concurrency} request{'s' if footprint.concurrency > 1 else ''} at once"
    engine = f"{footprint.engine} {footprint.engine_version or ''}".strip()
    click.echo(f"{footprint.model}: {engine}, {footprint.precision}, context {footprint.context_tokens}, {requests}")
    click.echo(f"Facts: {request.model.source}")
    for note in footprint.notes:
        click.echo(f"Note: {note}")
    for line in waterfall(footprint):
        click.echo(line)
    if service.text and (granted_bytes is not None or service.kv_tokens is not None):
        click.echo(f"Serves {service.text}.")
    if service.unused_text:
        click.echo(f"Note: {service.unused_text}.")
    for line in fit_lines(fits, device):
        click.echo(line)
    if savings and footprint.total_bytes == need.total_bytes:
        click.echo("Smaller:")
        for line in saving_lines(savings):
            click.echo(line)
    if footprint.flags and fits.whole:
        click.echo(f"Flags that make it so: {flag_line(footprint)}")


def _show_last_run(name: str, *, as_json: bool) -> None:
    """The most that it held, and what to ask for next time."""
    try:
        run = loads(last_run(find_home().path, Path(name).name).read_text())
    except FileNotFoundError:
        raise UnknownDeployment(
            f"no run of a program {name!r} has ended here", hint="`aimgpu exec --name NAME` names one."
        ) from None
    peak, granted = run["peak_bytes"], run["granted_bytes"]
    wanted = None if not peak or peak >= granted * _FULL else -(-round(peak * _ROOM) // MIB) * MIB
    if as_json:
        print_json({"name": name, **run, "proposed_bytes": wanted})
        return
    share, seconds = format_bytes(granted, up=True), run["seconds"]
    if peak is None:
        click.echo(f"{name} had {share} for {seconds} s; nothing counted what it held.")
    elif peak >= granted * _FULL:
        click.echo(f"{name} held all of its {share} in {seconds} s, so it may need more.")
    elif peak == 0:
        click.echo(f"{name} held nothing of its {share} in {seconds} s: it may not use the GPU.")
    else:
        click.echo(f"{name} held at most {format_bytes(peak, up=True)} of {share} in {seconds} s.")
        click.echo(f"Next time: --memory {format_bytes(wanted or peak, up=True)}, a tenth more than it took.")
