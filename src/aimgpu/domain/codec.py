"""Values of the domain as plain JSON values and back, exactly: what is written in one place can be read in any other."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from aimgpu.domain.ask import Auto, Fraction, Memory, PartitionKind, Whole
from aimgpu.errors import InvalidInput

_WANTS = {"auto": Auto, "memory": Memory, "fraction": Fraction, "partition": PartitionKind, "whole": Whole}
_WANT_NAMES = {kind: name for name, kind in _WANTS.items()}


def encode(value: object, *, defaults: bool = True) -> Any:  # noqa: ANN401 - JSON has no one type
    """Dataclasses become objects, sets sorted lists, a Want an object with one key that names it.

    Without `defaults` fields that have theirs are left out, so that a field that a build adds changes nothing.
    """
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        given = {item.name: getattr(value, item.name) for item in fields(value) if defaults or not _is_default(value, item)}
        body = {name: encode(item, defaults=defaults) for name, item in given.items()}
        return {_WANT_NAMES[type(value)]: body} if type(value) in _WANT_NAMES else body
    if isinstance(value, Mapping):
        return {str(key): encode(item, defaults=defaults) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(encode(item, defaults=defaults) for item in value)
    if isinstance(value, tuple):
        return [encode(item, defaults=defaults) for item in value]
    return value


def _is_default(value: object, item: Field[Any]) -> bool:
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    return bool(getattr(value, item.name) == default)


def decode(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - driven by the type given
    """The opposite of `encode` for the type `kind`; raises InvalidInput that names the place.

    Keys that the type does not have are refused; one that is missing takes its default.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), value, where)
    if origin in (tuple, frozenset):
        _expect(isinstance(value, list), where, "a list")
        item_kind = get_args(kind)[0]
        return origin(decode(item_kind, item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), where, "an object")
        item_kind = get_args(kind)[1]
        return {key: decode(item_kind, item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    return _decode_plain(kind, value, where)


def split_known(kind: Any, value: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401 - driven by the type given
    """An encoded value without the fields that `kind` does not have, and those fields, nested as they were.

    So what another build wrote can be read, and written back whole with `merge_unknown`.
    """
    kinds = [each for each in get_args(kind) or (kind,) if each is not types.NoneType]
    if not isinstance(value, Mapping):
        return value, {}
    if len(kinds) > 1 and len(value) == 1 and next(iter(value)) in _WANTS:
        name, body = next(iter(value.items()))
        known, unknown = split_known(_WANTS[name], body)
        return {name: known}, {name: unknown} if unknown else {}
    if len(kinds) != 1 or not is_dataclass(kinds[0]) or get_origin(kind) in (tuple, frozenset):
        return value, {}
    hints = _hints(kinds[0])  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, item in value.items():
        if name not in hints:
            rest[name] = item
            continue
        found[name], unknown = split_known(hints[name], item)
        if unknown:
            rest[name] = unknown
    return found, rest


def merge_unknown(encoded: Any, unknown: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON has no one type
    """The encoded value with the fields that `split_known` took out of the one before it."""
    if not unknown or not isinstance(encoded, Mapping):
        return encoded
    merged = dict(encoded)
    for name, item in unknown.items():
        if name not in merged:
            merged[name] = item
        elif isinstance(item, Mapping):
            merged[name] = merge_unknown(merged[name], item)
    return merged


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:  # noqa: ANN401
    if types.NoneType in kinds:
        rest = [kind for kind in kinds if kind is not types.NoneType]
        return None if value is None else decode(rest[0], value, where)
    _expect(
        isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _WANTS, where, f"one of {', '.join(_WANTS)}"
    )
    name, body = next(iter(value.items()))
    return decode(_WANTS[name], body, f"{where}.{name}")


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    _expect(isinstance(value, Mapping), where, "an object")
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    _expect(not unknown, where, f"an object without {', '.join(unknown)}")
    try:
        return kind(**{name: decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})
    except TypeError as error:
        raise InvalidInput(f"{where}: {error}") from error


def _decode_plain(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    if isinstance(kind, type) and issubclass(kind, Enum):
        _expect(value in [item.value for item in kind], where, f"one of {', '.join(item.value for item in kind)}")
        return kind(value)
    numbers = (int, float)
    fits = isinstance(value, numbers if kind is float else kind) and not (kind in numbers and isinstance(value, bool))
    _expect(fits, where, f"of type {kind.__name__}")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _expect(holds: bool, where: str, expected: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise InvalidInput(f"{where} is not {expected}")
