"""What a model needs: model, precision, context and concurrency in, a footprint out, term by term.

Here: formulas, readers of model file headers (given bytes, not paths), the catalogue, AIM profiles. Not here: files, GPUs,
engines. Pure: no I/O, no clock. Start at `estimate_footprint`.
"""

from aimgpu.sizing.catalogue import Catalogue, Row, built_in, combine, read_row, read_rows, write_rows
from aimgpu.sizing.count import parse_parameter_count
from aimgpu.sizing.footprint import estimate_footprint, estimate_need
from aimgpu.sizing.formats.folder_facts import facts_from_folder
from aimgpu.sizing.formats.gguf_facts import read_gguf, read_gguf_shards
from aimgpu.sizing.formats.safetensors import read_safetensors
from aimgpu.sizing.model import Architecture, ModelFacts, ModelKind
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.request import DEFAULT_CONTEXT, ENGINES, SizingRequest

__all__ = [
    "DEFAULT_CONTEXT",
    "ENGINES",
    "Architecture",
    "Catalogue",
    "ModelFacts",
    "ModelKind",
    "Row",
    "SizingRequest",
    "built_in",
    "combine",
    "estimate_footprint",
    "estimate_need",
    "facts_from_folder",
    "find_precision",
    "parse_parameter_count",
    "read_gguf",
    "read_gguf_shards",
    "read_row",
    "read_rows",
    "read_safetensors",
    "write_rows",
]
