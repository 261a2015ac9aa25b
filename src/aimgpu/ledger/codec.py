"""Domain values to JSON and back, exactly: a dataclass carries its class name, so a union decodes to what it was."""

import dataclasses
import functools
import types
import typing
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
_TYPE = "type"


def encode(value: object) -> Any:  # noqa: ANN401 - JSON has no narrower type
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_TYPE: type(value).__name__, **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(encode(item) for item in value)
    if isinstance(value, typing.Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | bool):
        return value
    raise TypeError(f"{type(value).__name__} has no place in the ledger")


def decode(kind: type[T], data: object) -> T:
    """The value of this type that `encode` wrote; raises ValueError for anything else."""
    try:
        return typing.cast("T", _decode(kind, data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error


def _decode(kind: Any, data: Any) -> Any:  # noqa: ANN401 - walks type hints
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data)
    if origin in (tuple, frozenset):
        item = typing.get_args(kind)[0]
        return origin(_decode(item, entry) for entry in data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data


def _decode_dataclass(kind: type, data: Any) -> Any:  # noqa: ANN401 - walks type hints
    if data[_TYPE] != kind.__name__:
        raise TypeError(f"a {data[_TYPE]} is no {kind.__name__}")
    # A field the writer did not know takes its default: an older ledger stays readable.
    return kind(**{name: _decode(hint, data[name]) for name, hint in _hints(kind).items() if name in data})


def _decode_union(options: tuple[Any, ...], data: Any) -> Any:  # noqa: ANN401 - walks type hints
    if data is None:
        return None
    classes = {option.__name__: option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)}
    if classes:
        return _decode(classes[data[_TYPE]], data)
    return _decode(next(option for option in options if option is not type(None)), data)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
