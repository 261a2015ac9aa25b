"""From a deployment to its Footprint: facts from the files or the catalogue, the formulas, what was measured before."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aimgpu.control.catalogue_file import CatalogueFile
from aimgpu.control.measurements import MeasurementFile
from aimgpu.control.model_files import find_model_facts
from aimgpu.domain import Deployment, Footprint, Vendor
from aimgpu.engines.protocols import Engine, LocalModel
from aimgpu.errors import InvalidInput
from aimgpu.hardware.protocols import DeviceReader
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.correction import Correction


def size_deployment(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
    """Raises UnknownModel where neither the files nor the package's catalogue say anything."""
    facts = find_model_facts(deployment.model, local.path if local else None, catalogue=built_in())
    return estimate_footprint(_request(deployment, engine, vendor, SizingRequest(model=facts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSizer:
    """Also knows the user's own models, this machine's GPU and engine versions, and what earlier runs took."""

    catalogue: CatalogueFile
    measurements: MeasurementFile
    devices: DeviceReader
    engines: Mapping[str, Engine]

    def __call__(self, deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
        facts = find_model_facts(deployment.model, local.path if local else None, catalogue=self.catalogue.catalogue())
        known = SizingRequest(model=facts, engine_version=self._version(engine), gpu=self._part(vendor))
        request = _request(deployment, engine, vendor, known)
        corrections, note = self._corrections(request)
        footprint = estimate_footprint(replace(request, corrections=corrections))
        return replace(footprint, notes=(*footprint.notes, *note))

    def _version(self, engine: str) -> str | None:
        known = self.engines.get(engine)
        return known.availability().version if known else None

    def _part(self, vendor: str) -> str | None:
        return next((device.part for device in self.devices.read_devices() if device.vendor == vendor), None)

    def _corrections(self, request: SizingRequest) -> tuple[Mapping[str, Correction], tuple[str, ...]]:
        """A damaged file of measurements stops no deployment; the Footprint says that nothing was learned from it."""
        try:
            return self.measurements.corrections(request.kind), ()
        except (InvalidInput, OSError) as error:
            return {}, (f"earlier measurements could not be read: {error}",)


def _request(deployment: Deployment, engine: str, vendor: str, known: SizingRequest) -> SizingRequest:
    return replace(
        known,
        engine=engine,
        precision=deployment.precision,
        context_tokens=deployment.context_tokens,
        concurrency=deployment.concurrency,
        tensor_parallel=max(deployment.ask.device_count, 1),
        vendor=Vendor(vendor),
    )
