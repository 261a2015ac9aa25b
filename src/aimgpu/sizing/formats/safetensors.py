"""Reads the header of a safetensors file: the table of its tensors, never the tensors. Hostile lengths are refused."""

import struct
from typing import BinaryIO, NamedTuple, NoReturn

import orjson

from aimgpu.errors import InvalidModelFile

_LARGEST_HEADER = 16 << 20  # a shard of the largest published models has less than 1 MiB
_MOST_DIMENSIONS = 8
_MOST_ELEMENTS = 1 << 50
DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F4": 4,
}


class SafeTensor(NamedTuple):
    """A tuple, because a model may have hundreds of thousands."""

    name: str
    dtype: str
    elements: int
    size_bytes: int


def read_header_length(stream: BinaryIO, file_bytes: int) -> int:
    """Bytes of the header; raises InvalidModelFile where no such file can have it."""
    head = stream.read(8)
    if len(head) < struct.calcsize("<Q"):
        _refuse("it is shorter than its own length field")
    (length,) = struct.unpack("<Q", head)
    if length > _LARGEST_HEADER or 8 + length > file_bytes:
        _refuse(f"it claims a header of {length} bytes; 16 MiB are read at most, and no more than the file has")
    return int(length)


def read_safetensors(stream: BinaryIO, file_bytes: int) -> tuple[SafeTensor, ...]:
    """The tensors of a safetensors stream that holds `file_bytes`; raises InvalidModelFile for anything else."""
    length = read_header_length(stream, file_bytes)
    text = stream.read(length)
    if len(text) < length:
        _refuse("it ends inside its header")
    try:
        table = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidModelFile(
            "not a usable safetensors file: its header is not JSON", hint="Download the file again."
        ) from error
    if not isinstance(table, dict):
        _refuse("its header is not a JSON object")
    table.pop("__metadata__", None)
    room = file_bytes - 8 - length
    tensors = tuple([_tensor(name, entry, room) for name, entry in table.items()])
    listed = sum([tensor.size_bytes for tensor in tensors])
    if listed > room:
        _refuse("its tensors lie over each other")
    if listed < room:  # the format allows no holes; a name that is listed twice leaves one
        _refuse(f"its tensors fill {listed} of its {room} bytes")
    return tensors


def _tensor(name: str, entry: object, room: int) -> SafeTensor:
    if not isinstance(entry, dict):
        _refuse(f"tensor {name[:80]!r} is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(f"tensor {name[:80]!r} has the unknown type {str(dtype)[:20]!r}")
    elements = _elements(name, shape)
    size = elements * DTYPE_BITS[dtype] // 8
    if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:  # noqa: PLR2004 -- begin and end
        _refuse(f"tensor {name[:80]!r} has no offsets")
    if not 0 <= offsets[0] <= offsets[1] <= room or offsets[1] - offsets[0] != size:
        _refuse(f"tensor {name[:80]!r} does not fit its place: the file is truncated or damaged")
    return SafeTensor(name, dtype, elements, size)


def _elements(name: str, shape: object) -> int:
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        _refuse(f"tensor {name[:80]!r} has no shape")
    elements = 1
    for length in shape:
        if not isinstance(length, int) or not 0 <= length <= _MOST_ELEMENTS:
            _refuse(f"tensor {name[:80]!r} has a length that no tensor has")
        elements *= length
        if elements > _MOST_ELEMENTS:
            _refuse(f"tensor {name[:80]!r} claims {elements} elements")
    return elements


def _refuse(why: str) -> NoReturn:
    raise InvalidModelFile(f"not a usable safetensors file: {why}", hint="Download the file again.")
