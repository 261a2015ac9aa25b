"""The opaque parameters of a claim or a DeviceClass: what its author demands of isolation and sharing.

config:
- requests: [gpu]
  opaque:
    driver: gpu.aim.amd.com
    parameters: {apiVersion: gpu.aim.amd.com/v1alpha1, kind: GpuClaimParameters, isolation: enforced, priority: high}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from aimgpu.domain import IsolationRequirement, Priority
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.vocabulary.names import PARAMETERS_KIND, PARAMETERS_VERSION

_Choice = TypeVar("_Choice", bound=StrEnum)
_FIELDS = ("apiVersion", "kind", "isolation", "priority", "limits")


class LimitScope(StrEnum):
    """Which containers of a pod share one set of limits."""

    REQUEST = "request"  # those that name the same request of the claim; different requests have limits of their own
    CLAIM = "claim"  # all that use the claim: its requests are added up


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    isolation: IsolationRequirement = IsolationRequirement.NONE
    priority: Priority = Priority.MEDIUM
    limits: LimitScope = LimitScope.REQUEST


def parse_parameters(value: Mapping[str, Any]) -> Parameters:
    """Raises InvalidInput with what is wrong and what can be written instead."""
    if value.get("apiVersion") != PARAMETERS_VERSION or value.get("kind") != PARAMETERS_KIND:
        raise InvalidInput(
            f"parameters of kind {value.get('apiVersion')}/{value.get('kind')} are not known",
            hint=f"Use apiVersion {PARAMETERS_VERSION} and kind {PARAMETERS_KIND}.",
        )
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise InvalidInput(f"parameters have the unknown field {unknown[0]!r}", hint=f"Fields: {', '.join(_FIELDS[2:])}.")
    return Parameters(
        isolation=_choose(IsolationRequirement, value, "isolation", IsolationRequirement.NONE),
        priority=_choose(Priority, value, "priority", Priority.MEDIUM),
        limits=_choose(LimitScope, value, "limits", LimitScope.REQUEST),
    )


def _choose(kind: type[_Choice], value: Mapping[str, Any], name: str, default: _Choice) -> _Choice:
    text = value.get(name, default.value)
    try:
        return kind(text)
    except ValueError as error:
        options = ", ".join(item.value for item in kind)
        raise InvalidInput(f"{name} cannot be {text!r}", hint=f"It can be {options}.") from error
