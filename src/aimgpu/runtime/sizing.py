"""What a model needs, by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Exactness, Footprint, Vendor
from aimgpu.errors import InvalidInput, UnknownModel
from aimgpu.files import read_bounded
from aimgpu.home import find_home
from aimgpu.sizing import Catalogue, ModelFacts, SizingRequest, estimate_footprint
from aimgpu.sizing.count import parse_parameter_count
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.weights import same_precision, weight_bytes

GB = 10**9
MIN_PARTITION_GB = 8.0
_LARGEST_NUMBER = 10**15  # far above every size and time; beyond it floats and the printing of integers overflow
_LONGEST_SHOWN = 60  # characters of a wrong value in a message
_ROOM_PERCENT = 10  # a partition that holds the model with some room to grow
_ROUNDED_PERCENT = 2  # 8.03B parameters at 2 bytes are listed as 16.0 GB
_LARGEST_FILE = 4 << 20
_KEYS = ("model_id", "parameters", "memory_gb", "quantization", "recommended_partition_gb")


def is_number(value: object) -> bool:
    """A finite number that can be computed with; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST_NUMBER < value < _LARGEST_NUMBER


def shown(value: object) -> str:
    """For messages: short, also where `repr` would be endless or refuse."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def to_bytes(size_gb: float) -> int:
    """Exact bytes of a number as a person wrote it: 40.1 is 40100000000, not what the float nearest to it holds."""
    return int(Decimal(str(size_gb)) * GB)


def gigabytes(size_bytes: int) -> str:
    """For messages: at most one decimal."""
    return f"{round(size_bytes / GB, 1):g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizeInfo:
    """What a model needs in one precision. GB are 10^9 bytes."""

    model_id: str
    parameters: int
    precision: str
    memory_bytes: int
    exactness: Exactness
    footprint: Footprint
    given_partition_gb: float | None = None

    @property
    def memory_gb(self) -> float:
        """What the model needs in all."""
        return self.memory_bytes / GB

    @property
    def recommended_partition_gb(self) -> float:
        """As given for the model, else room for it and a tenth more, in whole GB."""
        if self.given_partition_gb is not None:
            return self.given_partition_gb
        return float(-(-self.memory_bytes * (100 + _ROOM_PERCENT) // (100 * GB)))


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """True where the model fits; `reason` has the figures either way."""

    fits: bool
    reason: str

    def __bool__(self) -> bool:
        return self.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What the user entered for a model; the memory holds for the first precision that was listed."""

    facts: ModelFacts
    memory_bytes: int | None
    precisions: tuple[str, ...]
    partition_gb: float | None


class ModelSizingConfig:
    """Sizes of models from their files, from what the user entered, or from the catalogue; an unknown model is an error.

    The catalogue is the package's with what `aimgpu catalogue add` stored. `config_file` is YAML with entries under `models:`
    as `add_model` takes them.
    """

    def __init__(
        self,
        config_file: str | Path | None = None,
        *,
        engine: str = "vllm",
        context_tokens: int = 8192,
        concurrency: int = 1,
        catalogue: Catalogue | None = None,
    ) -> None:
        for name, count in (("context_tokens", context_tokens), ("concurrency", concurrency)):
            if not is_number(count) or not isinstance(count, int) or count < 1:
                raise InvalidInput(f"{name} cannot be {shown(count)}", hint="Give a whole number, 1 or more.")
        self._engine = engine
        self._context_tokens = context_tokens
        self._concurrency = concurrency
        self._catalogue = catalogue or CatalogueFile(find_home().catalogue_file).catalogue()
        self._given: dict[str, _Given] = {}
        if config_file is not None:
            for name, entry in _read_entries(Path(config_file)).items():
                self.add_model(**{"model_id": name, **entry})

    def add_model(
        self,
        model_id: str,
        parameters: str | int,
        memory_gb: float | None = None,
        quantization: Sequence[str] = ("fp16",),
        recommended_partition_gb: float | None = None,
    ) -> None:
        """Enter a model, or replace one. `memory_gb` is used for the first precision of `quantization`, others are estimated.

        Raises InvalidInput where the memory is less than the weights alone have (a figure that was rounded down by up to 2 % is
        taken as the weights), or more than the recommended partition.
        """
        if not isinstance(model_id, str) or not model_id.strip():
            raise InvalidInput(f"{shown(model_id)} is not the name of a model", hint="Give its name as text.")
        if isinstance(quantization, str) or not quantization:
            raise InvalidInput(f"{model_id}: quantization must be a list such as ['fp16']", hint="Give at least one precision.")
        precisions = tuple(find_precision(str(name)).name for name in quantization)
        if not isinstance(parameters, str) and not is_number(parameters):
            raise InvalidInput(f"{model_id}: parameters cannot be {shown(parameters)}", hint="Give how many, such as '7B'.")
        count = parse_parameter_count(str(parameters))
        known = self._catalogue.find(model_id)
        facts = known or ModelFacts(name=model_id, source="entered by the user", parameters=count, precision=precisions[0])
        memory = None if memory_gb is None else _entered(model_id, "memory_gb", memory_gb)
        if recommended_partition_gb is not None:
            _entered(model_id, "recommended_partition_gb", recommended_partition_gb)
        partition = None if recommended_partition_gb is None else float(recommended_partition_gb)
        weights = weight_bytes(facts, precisions[0])
        _check_memory(model_id, weights, memory, partition)
        if memory is not None:
            memory = max(memory, weights)  # a figure that was rounded down
        self._given[model_id] = _Given(facts=facts, memory_bytes=memory, precisions=precisions, partition_gb=partition)

    def get_model_size(self, model_id: str, precision: str | None = None) -> ModelSizeInfo:
        """Raises UnknownModel. `model_id`: a name that was entered or of the catalogue, or a .gguf file or model folder."""
        if not isinstance(model_id, str) or not model_id.strip():
            raise InvalidInput(f"{shown(model_id)} is not the name of a model", hint="Name a model, or the path of its files.")
        if precision is not None and not (isinstance(precision, str) and precision.strip()):
            raise InvalidInput(f"{shown(precision)} is not the name of a precision", hint="Name one, such as 'fp16' or 'int4'.")
        given = self._given.get(model_id)
        facts = given.facts if given is not None else self._facts(model_id)
        if given is not None and precision is None:
            precision = given.precisions[0]
        footprint = self._estimate(facts, precision)
        same = given is not None and same_precision(footprint.precision, given.precisions[0])
        entered = given.memory_bytes if given is not None and same else None
        return ModelSizeInfo(
            model_id=model_id,
            parameters=facts.parameters,
            precision=footprint.precision,
            memory_bytes=footprint.total_bytes if entered is None else entered,
            exactness=footprint.exactness,
            footprint=footprint,
            given_partition_gb=given.partition_gb if given is not None else None,
        )

    def can_fit(
        self,
        model_id: str,
        partition_gb: float,
        precision: str | None = None,
        *,
        reserve_gb: float = 0,
        min_partition_gb: float = MIN_PARTITION_GB,
    ) -> FitAnswer:
        """Whether the model fits into a partition of this size, with the reason.

        `reserve_gb` of the partition are not for models. A partition below `min_partition_gb` holds none, because
        `initialize` does not make it.
        """
        size = self.get_model_size(model_id, precision)
        total = _entered(model_id, "partition_gb", partition_gb)
        reserve, least = (
            0 if given == 0 else _entered(model_id, name, given)
            for name, given in (("reserve_gb", reserve_gb), ("min_partition_gb", min_partition_gb))
        )
        if total < least:
            reason = f"a partition of {partition_gb:g} GB is smaller than the least of {min_partition_gb:g} GB"
            return FitAnswer(fits=False, reason=reason)
        has = max(0, total - reserve)
        fits = size.memory_bytes <= has
        needed, shown_gb = round_up(size.memory_bytes), f"{has / GB:g}"
        if fits and float(needed) > has / GB:  # the two figures must not say the opposite of the answer
            needed = shown_gb
        kept = f" of {partition_gb:g} GB, {reserve_gb:g} GB are reserved" if reserve else " GB"
        return FitAnswer(fits, f"{model_id} needs {needed} GB as {size.precision}; the partition has {shown_gb}{kept}")

    def _estimate(self, facts: ModelFacts, precision: str | None) -> Footprint:
        trained = facts.architecture.max_context if facts.architecture else 0
        request = SizingRequest(
            model=facts,
            engine=self._engine,
            precision=precision,
            context_tokens=min(self._context_tokens, trained) if trained else self._context_tokens,
            concurrency=self._concurrency,
            vendor=Vendor.AMD,
        )
        return estimate_footprint(request)

    def _facts(self, model_id: str) -> ModelFacts:
        path = Path(model_id).expanduser()
        try:
            return find_model_facts(model_id, path if path.exists() else None, catalogue=self._catalogue)
        except UnknownModel as error:
            near = self._catalogue.near(model_id)
            meant = f"Did you mean {' or '.join(near)}? " if near else ""
            hint = f"{meant}Enter it with add_model(), or give the path of its folder or .gguf file."
            raise UnknownModel(error.message, hint=hint) from error


def _check_memory(model_id: str, weights: int, memory_bytes: int | None, partition_gb: float | None) -> None:
    if memory_bytes is not None and memory_bytes * 100 < weights * (100 - _ROUNDED_PERCENT):
        raise InvalidInput(
            f"{model_id}: memory_gb is {gigabytes(memory_bytes)}, its weights alone have {round_up(weights)} GB",
            hint="Give the memory that the running model needs, or leave memory_gb out to have it estimated.",
        )
    if partition_gb is not None and memory_bytes is not None and to_bytes(partition_gb) < memory_bytes:
        raise InvalidInput(
            f"{model_id}: recommended_partition_gb ({partition_gb:g}) is less than memory_gb ({gigabytes(memory_bytes)})",
            hint="Recommend a partition that holds the model.",
        )


def _entered(model_id: str, name: str, value: float) -> int:
    if not is_number(value) or value <= 0:
        raise InvalidInput(f"{model_id}: {name} cannot be {shown(value)}", hint="Give a number of GB above 0.")
    return to_bytes(value)


def round_up(size_bytes: int) -> str:
    """GB for messages about what is needed: never less than it is."""
    return f"{math.ceil(size_bytes * 10 / GB) / 10:g}"


def round_down(size_bytes: int) -> str:
    """GB for messages about what is available: never more than it is."""
    return f"{size_bytes * 10 // GB / 10:g}"


def _read_entries(path: Path) -> Mapping[str, dict[str, Any]]:
    try:
        read = yaml.safe_load(read_bounded(path, _LARGEST_FILE))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint="Check the path.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"{path} is not YAML: {error}", hint="Write `models:` with one entry per model.") from error
    models = read.get("models") if isinstance(read, dict) else None
    if not isinstance(models, dict) or not all(isinstance(entry, dict) for entry in models.values()):
        raise InvalidInput(f"{path} has no `models:` with an entry per model", hint="Each has parameters and memory_gb.")
    for name, entry in models.items():
        unknown = sorted(str(key) for key in entry if key not in _KEYS)
        if unknown or "parameters" not in entry:
            what = f"has the unknown key {unknown[0]!r}" if unknown else "lacks parameters"
            raise InvalidInput(f"{path}: {name} {what}", hint=f"Known: {', '.join(_KEYS)}.")
    return models
