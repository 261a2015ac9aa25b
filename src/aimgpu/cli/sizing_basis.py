"""What models are sized by on this machine, for this user."""

from collections.abc import Iterable

from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis, read_basis
from aimgpu.home import find_home
from aimgpu.wiring import installed_versions


def own_basis(engines: Iterable[str]) -> SizingBasis:
    """Of this home, with the versions of these engines where they are installed."""
    home = find_home()
    return read_basis(CatalogueFile(home.catalogue_file), MeasurementFile(home.measurements_file), installed_versions(engines))
