"""What a stack file says under `slo`."""

from typing import Any

from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Priority, ServiceObjective
from aimgpu.domain.objective import MEASURES, PERCENTS
from aimgpu.units import parse_duration_ms, parse_ppm, parse_token_rate, parse_token_time_ms

_DURATIONS = tuple(f"{measure}_p{percent}" for measure in MEASURES for percent in PERCENTS)
PROMISES = (*_DURATIONS, "throughput", "availability")
SLO_KEYS = (*PROMISES, "classes")
_EXAMPLE = "slo: {ttft_p95: 500ms}"


def read_objective(node: YamlNode | None) -> ServiceObjective | None:
    """What stands under `slo`; None: nothing was promised."""
    if node is None:
        return None
    fields = node.fields(SLO_KEYS)
    if not fields:
        raise node.complaint("'slo' is empty", f"For example: {_EXAMPLE}")
    by_class = _read_classes(fields.pop("classes", None))
    return ServiceObjective(**_read_promises(fields), **by_class)


def _read_classes(node: YamlNode | None) -> dict[str, Any]:
    if node is None:
        return {}
    classes = node.fields([priority.value for priority in Priority], "a mapping from high, medium or low to promises")
    if not classes:
        raise node.complaint("'classes' is empty", "For example: classes: {low: {latency_p95: 60s}}")
    found = {}
    for name, given in classes.items():
        promises = given.fields(PROMISES)
        if not promises:
            raise given.complaint(f"{name!r} is empty", "Leave it out: a class without its own has the model's.")
        found[name] = ServiceObjective(**_read_promises(promises))
    return found


def _read_promises(fields: dict[str, YamlNode]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{key}_ms": fields[key].quantity(parse_token_time_ms if key.startswith("tpot") else parse_duration_ms, "500ms")
        for key in _DURATIONS
        if key in fields
    }
    if "throughput" in fields:
        found["tokens_per_second"] = fields["throughput"].quantity(parse_token_rate, "200tok/s")
    if "availability" in fields:
        found["availability_ppm"] = fields["availability"].quantity(parse_ppm, "99.5%")
    for key, text in ServiceObjective(**found).contradictions():
        raise fields[key].complaint(text, "More of the requests cannot be promised a shorter time. Swap them, or keep one.")
    return found
