"""What models need on a GPU, for a recommendation of replicas."""

from collections.abc import Sequence

from aimgpu.cli.sizing_basis import own_basis
from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.kubernetes.cluster.timeslicing.recommendation import SizedModel
from aimgpu.sizing import SizingRequest, estimate_need
from aimgpu.wiring import find_device

_OLLAMA_PRECISION = "q4_k_m"  # what its library serves unless a tag says otherwise


def size_models(
    models: Sequence[str], *, gpu: str | None, engine: str, precision: str | None, context: int | None, concurrency: int
) -> tuple[list[SizedModel], int]:
    """The models with their footprints, and the memory of the GPU."""
    basis, device = own_basis([engine]), find_device(gpu)
    found = []
    for name in models:
        facts = find_model_facts(name, parameters=None, catalogue=basis.catalogue())
        request = SizingRequest(
            model=facts,
            engine=engine,
            engine_version=basis.versions.get(engine),
            precision=precision or (_OLLAMA_PRECISION if engine == "ollama" and not facts.in_gguf else None),
            context_tokens=context,
            concurrency=concurrency,
            vendor=device.vendor,
            gpu=device.product,
            device_memory_bytes=device.memory_bytes,
        )
        footprint = estimate_need(basis.corrected(request))
        found.append(SizedModel(name=name, parameters=facts.parameters, memory_bytes=footprint.total_bytes))
    return found, device.memory_bytes
