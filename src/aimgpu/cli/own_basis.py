"""What models are sized by on this machine, for this user."""

from collections.abc import Iterable

from aimgpu.cli.home import find_home
from aimgpu.cli.wiring import installed_versions
from aimgpu.control.catalogue_file import CatalogueFile
from aimgpu.control.measurements import MeasurementFile
from aimgpu.control.sizing_basis import SizingBasis, read_basis


def own_basis(engines: Iterable[str]) -> SizingBasis:
    """Of this home, with the versions of these engines where they are installed."""
    home = find_home()
    return read_basis(CatalogueFile(home.catalogue_file), MeasurementFile(home.measurements_file), installed_versions(engines))
