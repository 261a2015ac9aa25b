"""What the gateway reports to clients about a model: its weights, its context, what it was granted."""

import contextlib
import math
import time
from collections.abc import Sequence

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Deployment, Instance
from aimgpu.engines.protocols import ModelStore
from aimgpu.errors import AimGpuError
from aimgpu.gateway.routes import ModelCard
from aimgpu.sizing import ModelFacts, SizingRequest
from aimgpu.sizing.engines.table import ENGINE_SIZINGS
from aimgpu.sizing.model import ModelKind

_RANKING = "reranking"
_PURPOSES = frozenset({_RANKING, "embedding"})  # flags of llama.cpp
_LOOK_AGAIN_SECONDS = 5.0  # for the files of a model that has none yet


class ModelCards:
    """Facts of a model are read once: its files do not change while it is deployed."""

    def __init__(self, models: ModelStore) -> None:
        self._models = models
        self._facts: dict[str, ModelFacts] = {}
        self._without_files: dict[str, tuple[float, ModelFacts | None]] = {}  # when it was looked for, and what else is known

    def make(self, deployment: Deployment, instances: Sequence[Instance]) -> ModelCard:
        facts = self._read_facts(deployment.model)
        engine = next((instance.engine for instance in instances), deployment.engine)
        engine = engine if engine in ENGINE_SIZINGS else None  # of a server that is not known, nothing is expected
        granted = sum(grant.memory_bytes for instance in instances for grant in instance.grants)
        started = min((one.context_tokens for one in instances if one.context_tokens), default=None)
        context = started or deployment.context_tokens
        if facts is None:
            return ModelCard(engine=engine, memory_bytes=granted or None, context_tokens=context)
        shape = facts.architecture
        return ModelCard(
            engine=engine,
            format="gguf" if facts.in_gguf else "safetensors",
            family=shape.family if shape else None,
            parameters=facts.parameters,
            quantization=(deployment.precision or facts.precision).upper(),
            weights_bytes=facts.tensor_bytes,
            memory_bytes=granted or None,
            context_tokens=SizingRequest(model=facts, context_tokens=context).context,
            embedding_length=shape.hidden_size if shape else None,
            embeds=shape is not None and shape.kind is ModelKind.ENCODER,
            ranks=_ranks(deployment, facts),
        )

    def _read_facts(self, model: str) -> ModelFacts | None:
        """None: not known yet, as of a model that is still being fetched."""
        if model in self._facts:
            return self._facts[model]
        looked, facts = self._without_files.get(model, (-math.inf, None))
        if time.monotonic() - looked < _LOOK_AGAIN_SECONDS:
            return facts
        with contextlib.suppress(AimGpuError, OSError):
            local = self._models.find(model)
            facts = find_model_facts(model, local.path if local else None)
            if local is not None:
                self._facts[model] = facts
                return facts
        self._without_files[model] = (time.monotonic(), facts)  # from the catalogue: its files will say more
        return facts


def _ranks(deployment: Deployment, facts: ModelFacts) -> bool:
    """As its engine is started: for what the user's flags ask, else for what an encoder's file says of itself."""
    asked = [flag for flag, *_ in deployment.overrides.arguments if flag in _PURPOSES]
    if asked:
        return asked[-1] == _RANKING
    return facts.ranks and facts.architecture is not None and facts.architecture.kind is ModelKind.ENCODER
