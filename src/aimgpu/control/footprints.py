"""From a deployment to its Footprint: facts from the files or the catalogue, then the formulas."""

from aimgpu.control.model_files import find_model_facts
from aimgpu.domain import Deployment, Footprint, Vendor
from aimgpu.engines.protocols import LocalModel
from aimgpu.sizing import SizingRequest, estimate_footprint


def size_deployment(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
    """Raises UnknownModel where neither the files nor the catalogue say anything."""
    facts = find_model_facts(deployment.model, local.path if local else None)
    return estimate_footprint(
        SizingRequest(
            model=facts,
            engine=engine,
            precision=deployment.precision,
            context_tokens=deployment.context_tokens,
            concurrency=deployment.concurrency,
            vendor=Vendor(vendor),
        )
    )
