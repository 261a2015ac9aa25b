"""Reads the header of a GGUF file: metadata and tensor table, never the tensors.

A header may lie about every length. Each is checked against the bytes that the file has and against bounds that no real model
reaches, so that a hostile file costs a bounded amount of memory and time and ends in InvalidModelFile.
"""

import struct
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

from aimgpu.errors import InvalidModelFile
from aimgpu.sizing.formats.gguf_types import TENSOR_TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER_LIMIT = 128 << 20  # a vocabulary of 262,144 tokens with merges takes about 20 MiB
_CHUNK = 1 << 20
_MOST_KEYS = 4096
_MOST_TENSORS = 200_000
_MOST_ELEMENTS = 8_000_000
_MOST_DIMENSIONS = 4
_MOST_SIZE = 1 << 50
_LONGEST_NAME = 1024
_LONGEST_KEPT_STRING = 4096
_LONGEST_KEPT_ARRAY = 1024  # per-layer numbers are kept, vocabularies are only counted

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One entry of the tensor table."""

    name: str
    type: str
    elements: int
    size_bytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensor table of a file."""

    metadata: dict[str, Scalar | tuple[Scalar, ...]]
    array_lengths: dict[str, int]
    tensors: tuple[Tensor, ...]
    header_bytes: int


def read_header(stream: BinaryIO, file_bytes: int) -> GgufHeader:
    """The header of a GGUF stream that holds `file_bytes`; raises InvalidModelFile for anything else."""
    cursor = _Cursor(stream, min(file_bytes, _HEADER_LIMIT))
    if cursor.take(4) != _MAGIC:
        _refuse("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        _refuse(f"its version is {version}, known are 2 and 3 in little-endian order")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > _MOST_TENSORS or key_count > _MOST_KEYS:
        _refuse(f"it claims {tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
    lengths: dict[str, int] = {}
    for _ in range(key_count):
        _read_pair(cursor, metadata, lengths)
    placed = [_read_tensor(cursor) for _ in range(tensor_count)]
    _check_extent(placed, cursor.position, metadata.get("general.alignment", 32), file_bytes)
    return GgufHeader(
        metadata=metadata,
        array_lengths=lengths,
        tensors=tuple(tensor for tensor, _ in placed),
        header_bytes=cursor.position,
    )


def _read_pair(cursor: "_Cursor", metadata: dict[str, Scalar | tuple[Scalar, ...]], lengths: dict[str, int]) -> None:
    key = cursor.text(_LONGEST_NAME)
    kind = cursor.number("I")
    if kind == _ARRAY:
        count, kept = _read_array(cursor)
        lengths[key] = count
        if kept is not None:
            metadata[key] = kept
    elif kind == _STRING:
        value = cursor.short_text()
        if value is not None:
            metadata[key] = value
    elif kind in _SCALARS:
        metadata[key] = cursor.scalar(_SCALARS[kind])
    else:
        _refuse(f"key {key!r} has the unknown type {kind}")


def _read_array(cursor: "_Cursor") -> tuple[int, tuple[Scalar, ...] | None]:
    kind, count = cursor.number("I"), cursor.number("Q")
    if count > _MOST_ELEMENTS:
        _refuse(f"an array claims {count} elements")
    cursor.spend(count)
    if kind == _STRING:
        cursor.skip_texts(count)
        return count, None
    if kind not in _SCALARS:
        _refuse(f"an array has elements of the unknown type {kind}")
    if count > _LONGEST_KEPT_ARRAY:
        cursor.skip(count * struct.calcsize("<" + _SCALARS[kind]))
        return count, None
    return count, tuple(cursor.scalar(_SCALARS[kind]) for _ in range(count))


def _read_tensor(cursor: "_Cursor") -> tuple[Tensor, int]:
    name = cursor.text(_LONGEST_NAME)
    dimensions = cursor.number("I")
    if dimensions > _MOST_DIMENSIONS:
        _refuse(f"tensor {name!r} claims {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    elements = 1
    for length in shape:
        elements *= length
        if elements > _MOST_SIZE:
            _refuse(f"tensor {name!r} claims {elements} or more weights")
    kind = cursor.number("I")
    if kind not in TENSOR_TYPES:
        _refuse(f"tensor {name!r} has the unknown type {kind}")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if elements % block:
        _refuse(f"tensor {name!r} does not fill its blocks of {block}")
    offset = cursor.number("Q")
    tensor = Tensor(name=name, type=type_name, elements=elements, size_bytes=elements // block * block_bytes, shape=shape)
    return tensor, offset


def _check_extent(placed: list[tuple[Tensor, int]], header_bytes: int, alignment: object, file_bytes: int) -> None:
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        _refuse(f"its alignment is {alignment!r}")
    start = -(-header_bytes // alignment) * alignment
    end = start + max((offset + tensor.size_bytes for tensor, offset in placed), default=0)
    if end > file_bytes:
        _refuse(f"it is truncated: its tensors end at byte {end}, the file at {file_bytes}")
    if sum(tensor.size_bytes for tensor, _ in placed) > file_bytes - start:
        _refuse("its tensors lie over each other")


@dataclass(slots=True)
class _Cursor:
    """Reads forward only, never past `limit`, in chunks of bounded size."""

    stream: BinaryIO
    limit: int
    position: int = 0
    _buffer: bytes = b""
    _at: int = 0
    _spent: int = field(default=0)

    def take(self, count: int) -> bytes:
        if self.position + count > self.limit:
            _refuse("its header runs past the end of the file or past every sane size")
        if len(self._buffer) - self._at < count:
            self._fill(count)
        data = self._buffer[self._at : self._at + count]
        self._at += count
        self.position += count
        return data

    def skip(self, count: int) -> None:
        while count > 0:
            step = min(count, _CHUNK)
            self.take(step)
            count -= step

    def skip_texts(self, count: int) -> None:
        """A tokenizer has a hundred thousand strings that no fact needs: those whole in the buffer cost no call each."""
        done = 0
        while done < count:
            buffer, start, at = self._buffer, self._at, self._at
            end = min(len(buffer), start + self.limit - self.position)
            while done < count and at + 8 <= end:
                after = at + 8 + int.from_bytes(buffer[at : at + 8], "little")
                if after > end:
                    break
                at, done = after, done + 1
            self._at, self.position = at, self.position + at - start
            if done < count:
                self.skip(self.number("Q"))
                done += 1

    def spend(self, elements: int) -> None:
        self._spent += elements
        if self._spent > _MOST_ELEMENTS:
            _refuse(f"its arrays claim more than {_MOST_ELEMENTS} elements")

    def number(self, kind: str) -> int:
        value: int = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]
        return value

    def scalar(self, kind: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]
        return value

    def text(self, longest: int) -> str:
        length = self.number("Q")
        if length > longest:
            _refuse(f"a name claims {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def short_text(self) -> str | None:
        """A string value; None for one too long to be a fact, such as a chat template."""
        length = self.number("Q")
        if length > _LONGEST_KEPT_STRING:
            self.skip(length)
            return None
        return self.take(length).decode("utf-8", "replace")

    def _fill(self, count: int) -> None:
        parts = [self._buffer[self._at :]]
        have = len(parts[0])
        while have < count:
            part = self.stream.read(_CHUNK)
            if not part:
                _refuse("it ends inside its header")
            parts.append(part)
            have += len(part)
        self._buffer, self._at = b"".join(parts), 0


def _refuse(why: str) -> NoReturn:
    raise InvalidModelFile(f"not a usable GGUF file: {why}", hint="Download it again, or give the path of another file.")
