"""Rows as text and back. Fields that another build of this schema wrote are kept beside the value and written back with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from aimgpu.domain.codec import decode, encode, merge_unknown, split_known

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LedgerRow(Generic[T]):
    """A value, and the fields of its row that this build does not know."""

    value: T
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def with_value(self, value: T) -> "LedgerRow[T]":
        """Another value in the same row."""
        return LedgerRow(value, self.unknown)

    @property
    def text(self) -> str:
        """As it is stored."""
        return json.dumps(merge_unknown(encode(self.value), self.unknown))


def read_row(kind: type[T], text: str, where: str) -> LedgerRow[T]:
    """Raises ValueError where the text is not JSON, or lacks what the value needs."""
    known, unknown = split_known(kind, json.loads(text))
    value: T = decode(kind, known, where)
    return LedgerRow(value, unknown)
