"""What a model needs, by name."""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Exactness, Footprint, Vendor
from aimgpu.sizing import Catalogue, SizingRequest, built_in, estimate_footprint

GB = 10**9
_ROOM_PERCENT = 10  # a partition that holds the model with some room to grow


def to_bytes(gigabytes: float) -> int:
    """Exact bytes of a number as a person wrote it: 40.1 is 40100000000, not what the float nearest to it holds."""
    return int(Decimal(str(gigabytes)) * GB)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizeInfo:
    model_id: str
    parameters: int
    precision: str
    memory_bytes: int
    exactness: Exactness
    footprint: Footprint

    @property
    def memory_gb(self) -> float:
        return self.memory_bytes / GB

    @property
    def recommended_partition_gb(self) -> float:
        """Room for the model and a tenth more, in whole GB."""
        return float(-(-self.memory_bytes * (100 + _ROOM_PERCENT) // (100 * GB)))


class ModelSizingConfig:
    """Sizes of models from their files, or from the catalogue; an unknown model is an error, never a guess."""

    def __init__(
        self, *, engine: str = "vllm", context_tokens: int = 8192, concurrency: int = 1, catalogue: Catalogue | None = None
    ) -> None:
        self._engine = engine
        self._context_tokens = context_tokens
        self._concurrency = concurrency
        self._catalogue = catalogue or built_in()

    def get_model_size(self, model_id: str, precision: str | None = None) -> ModelSizeInfo:
        """Raises UnknownModel. `model_id`: a name of the catalogue, or the path of a .gguf file or model folder."""
        path = Path(model_id).expanduser()
        facts = find_model_facts(model_id, path if path.exists() else None, catalogue=self._catalogue)
        trained = facts.architecture.max_context if facts.architecture else 0
        request = SizingRequest(
            model=facts,
            engine=self._engine,
            precision=precision,
            context_tokens=min(self._context_tokens, trained) if trained else self._context_tokens,
            concurrency=self._concurrency,
            vendor=Vendor.AMD,
        )
        footprint = estimate_footprint(request)
        return ModelSizeInfo(
            model_id=model_id,
            parameters=facts.parameters,
            precision=footprint.precision,
            memory_bytes=footprint.total_bytes,
            exactness=footprint.exactness,
            footprint=footprint,
        )

    def can_fit(self, model_id: str, partition_gb: float, precision: str | None = None) -> bool:
        return self.get_model_size(model_id, precision).memory_bytes <= to_bytes(partition_gb)
