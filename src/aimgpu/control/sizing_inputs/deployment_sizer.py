"""From a deployment to its footprint: facts from the files or the catalogue, the formulas, what was measured before."""

from collections.abc import Mapping
from dataclasses import dataclass

from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.control.sizing_inputs.sizing_basis import read_basis
from aimgpu.domain import Deployment, Device, Footprint
from aimgpu.engines.protocols import Engine, LocalModel
from aimgpu.hardware.protocols import DeviceReader


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSizer:
    """Knows the user's own models, this machine's GPU and engine versions, and what earlier runs took."""

    catalogue: CatalogueFile
    measurements: MeasurementFile
    devices: DeviceReader
    engines: Mapping[str, Engine]

    def __call__(self, deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
        basis = read_basis(self.catalogue, self.measurements, {engine: self._version(engine)})
        return basis.size(deployment, engine, local, self._device(vendor))

    def _version(self, engine: str) -> str | None:
        known = self.engines.get(engine)
        return known.availability().version if known else None

    def _device(self, vendor: str) -> Device | None:
        return next((device for device in self.devices.read_devices() if device.vendor == vendor), None)
