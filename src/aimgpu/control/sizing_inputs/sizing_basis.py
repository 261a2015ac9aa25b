"""What an estimate goes by beside the model and the GPU: the engines that are here, what was measured, the user's own models.

A snapshot carries it, so that models are sized elsewhere as they would be where it was taken.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aimgpu.control.sizing_inputs.adapter_files import read_adapters
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Deployment, Device, EngineOverrides, Footprint
from aimgpu.engines.models.packaged import find_packaged
from aimgpu.engines.ollama.store import find_model_file
from aimgpu.engines.protocols import LocalModel
from aimgpu.errors import InvalidInput
from aimgpu.sizing import Catalogue, Row, SizingRequest, built_in, combine, estimate_footprint, read_rows, write_rows
from aimgpu.sizing.correction import Measurement, from_json, learn, learn_startup, to_json
from aimgpu.sizing.engines.table import ENGINE_SIZINGS
from aimgpu.sizing.fits import find_divisions

_KEYS = frozenset({"engines", "runnable", "measurements", "models"})
UNSIZED_CONCURRENCY = 8  # requests at once of a server that is not known, unless the stack file says
_HINT = "Write it with `aimgpu snapshot`."


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingBasis:
    """Versions, measurements and models that estimates go by."""

    versions: Mapping[str, str | None] = field(default_factory=dict)  # of engines that are installed
    runnable: tuple[str, ...] | None = None  # engines that can run there, best first; None: on GPUs not bought yet, any can
    measurements: tuple[Measurement, ...] = ()
    models: tuple[Row, ...] = ()  # that the user added
    notes: tuple[str, ...] = ()  # what could not be read

    def catalogue(self) -> Catalogue:
        """The package's models and the user's; the user's win."""
        return combine(built_in().rows, self.models) if self.models else built_in()

    def catalogue_name(self, model: str, engine: str) -> str:
        """Of a model that comes with a package, by its short name too; Ollama's tags are names of its own."""
        packaged = find_packaged(model) if engine != "ollama" and self.catalogue().find(model) is None else None
        return packaged.name if packaged is not None else model

    def about(self, parts: Iterable[str]) -> "SizingBasis":
        """With the measurements on GPUs of these parts alone."""
        wanted = frozenset(parts)
        return replace(self, measurements=tuple(one for one in self.measurements if one.gpu in wanted))

    def request(self, deployment: Deployment, engine: str, local: LocalModel | None, device: Device | None) -> SizingRequest:
        """Raises UnknownModel where neither the files nor the catalogue say anything."""
        path = _model_path(deployment.model, engine, local)
        name = deployment.model if path is not None else self.catalogue_name(deployment.model, engine)
        request = SizingRequest(
            model=find_model_facts(name, path, catalogue=self.catalogue()),
            engine=engine,
            engine_version=self.versions.get(engine),
            precision=deployment.precision,
            context_tokens=deployment.context_tokens,
            concurrency=deployment.concurrency or 1,
            tensor_parallel=max(deployment.ask.device_count, 1),
        )
        if device is not None:
            request = replace(request, vendor=device.vendor, gpu=device.product)
        request = with_engine_arguments(request, deployment.overrides)
        request = replace(request, adapters=read_adapters(deployment, engine, request.model, path))
        if deployment.concurrency is None:
            request = ENGINE_SIZINGS[engine].own_concurrency(request)
        return self.corrected(request)

    def corrected(self, request: SizingRequest) -> SizingRequest:
        """With what earlier runs of this kind were measured to take."""
        startup = learn_startup(self.measurements, request.kind, request.model.name)
        return replace(
            request,
            corrections=learn(self.measurements, request.kind),
            learned_startup_bytes=startup[0] if startup else None,
            learned_startup_runs=startup[1] if startup else 0,
        )

    def size(self, deployment: Deployment, engine: str, local: LocalModel | None, device: Device | None) -> Footprint:
        """The footprint of one instance, with notes on what could not be read; without terms where nobody can size it."""
        if engine not in ENGINE_SIZINGS:
            return unsized_footprint(deployment, engine)
        footprint = estimate_on(self.request(deployment, engine, local, device), device)
        return replace(footprint, notes=(*footprint.notes, *self.notes))


def unsized_footprint(deployment: Deployment, engine: str) -> Footprint:
    """Of a server that is not known: it takes what it is granted."""
    return Footprint(
        model=deployment.model,
        engine=engine,
        precision="",
        context_tokens=0,
        concurrency=deployment.concurrency or UNSIZED_CONCURRENCY,
        terms=(),
    )


def _model_path(model: str, engine: str, local: LocalModel | None) -> Path | None:
    """Ollama serves from its own store, and a tag there says nothing without the file behind it."""
    return find_model_file(model) if engine == "ollama" else local.path if local else None


def estimate_on(request: SizingRequest, device: Device | None) -> Footprint:
    """The footprint; where one such device is too small, with what it would be on each of several."""
    footprint = estimate_footprint(request)
    if device is None or footprint.total_bytes <= device.memory_bytes:
        return footprint
    return replace(footprint, divided=find_divisions(request, device.memory_bytes))


def read_basis(catalogue: CatalogueFile, measurements: MeasurementFile, versions: Mapping[str, str | None]) -> SizingBasis:
    """From the user's files. A damaged file of measurements stops nothing; a note says that nothing was learned from it."""
    basis = SizingBasis(versions=versions, models=catalogue.read())
    try:
        return replace(basis, measurements=measurements.read())
    except (InvalidInput, OSError) as error:
        return replace(basis, notes=(f"earlier measurements could not be read: {error}",))


def basis_to_json(basis: SizingBasis) -> dict[str, Any]:
    """For a snapshot."""
    return {
        "engines": dict(basis.versions),
        "runnable": None if basis.runnable is None else list(basis.runnable),
        "measurements": to_json(basis.measurements),
        "models": write_rows(basis.models) if basis.models else "",
    }


def basis_from_json(value: object) -> SizingBasis:
    """Raises InvalidInput where this is not what `basis_to_json` wrote."""
    if not isinstance(value, Mapping) or not set(value) <= _KEYS:
        raise InvalidInput(f"snapshot.sizing is not an object with {', '.join(sorted(_KEYS))}", hint=_HINT)
    versions, runnable, models = value.get("engines", {}), value.get("runnable"), value.get("models", "")
    if not isinstance(versions, Mapping) or not all(one is None or isinstance(one, str) for one in versions.values()):
        raise InvalidInput("snapshot.sizing.engines is not an object of versions", hint=_HINT)
    if runnable is not None and not (isinstance(runnable, list) and all(isinstance(one, str) for one in runnable)):
        raise InvalidInput("snapshot.sizing.runnable is not a list of names", hint=_HINT)
    if not isinstance(models, str):
        raise InvalidInput("snapshot.sizing.models is not text", hint=_HINT)
    return SizingBasis(
        versions=dict(versions),
        runnable=None if runnable is None else tuple(runnable),
        measurements=from_json(value.get("measurements", [])),
        models=tuple(read_rows(models)) if models else (),
    )


_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def with_engine_arguments(request: SizingRequest, overrides: EngineOverrides) -> SizingRequest:
    """VLLM's --kv-cache-dtype, --enforce-eager and --max-num-batched-tokens."""
    if request.engine != "vllm":
        return request
    given = {name: values for name, *values in overrides.arguments}
    kind = " ".join(given.get("kv-cache-dtype", ()))
    if kind in _FP8:
        request = replace(request, kv_precision="fp8")
    if "enforce-eager" in given:
        request = replace(request, graphs=False)
    if "max-num-batched-tokens" in given:
        text = " ".join(given["max-num-batched-tokens"])
        if not text.isdecimal():
            raise InvalidInput(f"--max-num-batched-tokens {text!r} is not a whole number", hint="For example 2048.")
        request = replace(request, batched_tokens=int(text))
    return request
