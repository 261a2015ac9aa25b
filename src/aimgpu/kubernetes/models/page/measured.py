"""What the node agents measured, from their metrics: use of GPUs and partitions, and of the pods' shares. Pure."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aimgpu.domain import DeviceUsage, Priority
from aimgpu.isolation.region import TenantUse
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.api.foreign_objects import leaving_out

_LINE = re.compile(r'(aim_\w+)\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} (\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_BUSY = "aim_gpu_utilization_ratio"
_PARTITION = "aim_gpu_partition_memory_measured_bytes"
_USED, _WAITED = "aim_model_memory_used_bytes", "aim_model_gate_wait_seconds_total"

_Sample = tuple[str, dict[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasures:
    usage: Mapping[str, DeviceUsage] = field(default_factory=dict)  # by GPU, as node/id
    claims: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by claim: bytes, seconds waited at the gate


def read_measured(texts: Iterable[str]) -> NodeMeasures:
    """Of all agents together."""
    busy: dict[str, float] = {}
    parts: dict[str, dict[str, int]] = {}
    claims: dict[str, dict[str, float]] = {}
    for name, labels, value in (sample for text in texts for sample in _samples(text)):
        gpu = f"{labels.get('node')}/{labels.get('gpu')}"
        if name == _BUSY:
            busy[gpu] = value
        elif name == _PARTITION:
            parts.setdefault(gpu, {})[f"{labels.get('node')}/{labels.get('partition')}"] = int(value)
        elif name in (_USED, _WAITED):
            found = claims.setdefault(labels.get("instance_id", "").rpartition(".")[0], {})  # without the claim's request
            found[name] = found.get(name, 0.0) + value
    usage = {
        gpu: DeviceUsage(
            device_id=gpu,
            used_bytes=sum(parts[gpu].values()) if gpu in parts else None,
            used_bytes_by_partition=parts.get(gpu, {}),
            utilization_percent=round(busy[gpu] * 100) if gpu in busy else None,
            processes=(),
        )
        for gpu in {*busy, *parts}
    }
    return NodeMeasures(
        usage=usage,
        claims={name: (one.get(_USED, 0.0), one.get(_WAITED, 0.0)) for name, one in claims.items() if _USED in one},
    )


def tenants_of(measured: NodeMeasures, shares: Sequence[Object]) -> dict[str, TenantUse]:
    """Measured tenants by pod, found by the claim of its share."""
    found = {}
    for share in shares:
        with leaving_out(share):
            for replica in (share.get("status") or {}).get("replicas") or ():
                use = measured.claims.get(f"{share['metadata']['namespace']}/{replica.get('claim')}")
                if use is not None and replica.get("pod"):
                    found[str(replica["pod"])] = _tenant(str(replica["pod"]), *use)
    return found


def _tenant(name: str, used: float, waited: float) -> TenantUse:
    return TenantUse(
        name=name,
        cap_bytes=0,
        used_bytes=int(used),
        peak_bytes=0,
        denied=0,
        priority=Priority.MEDIUM,
        compute_ppm=0,
        gpu_seconds=0.0,
        waited_seconds=waited,
        overruns=0,
        quiet_ns=0,
        yield_ppm=0,
        longest_launch_ns=0,
        held=0,
        held_seconds=0.0,
        requests=0,
        touched=0,
        processes=(),
    )


def _samples(text: str) -> Iterator[_Sample]:
    """Lines that are not samples, or without a finite value, are skipped: an agent that is ending may answer anything."""
    for line in text.split("\n"):
        match = _LINE.match(line)
        value = _finite(match[3]) if match is not None else None
        if match is not None and value is not None:
            yield match[1], {name: _unescaped(given) for name, given in _LABEL.findall(match[2])}, value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
