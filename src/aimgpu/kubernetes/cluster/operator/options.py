"""What the operator is started with."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from aimgpu.units import parse_duration_ms

NEVER = "never"


class PlacementForm(StrEnum):
    """How kube-scheduler learns where to look: `status.nominatedNodeName`, or required node affinity."""

    HINT = "hint"
    AFFINITY = "affinity"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    namespace: str  # of its Lease
    namespaces: frozenset[str] = frozenset()  # whose workloads it looks after; empty: all
    metrics_port: int = 0  # 0: no metrics and no probes
    keep_templates_seconds: float = 600.0  # a claim template that no pod uses is removed after twice this time
    placement: PlacementForm | None = None  # None: off
    waiting_seconds: float | None = 60.0  # for a node, until kube-scheduler and autoscalers see the pod; None: for ever


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> OperatorOptions:
    parser = argparse.ArgumentParser(prog="aimgpu-operator", description="Reports GPU shares and carries out partition plans.")
    default = environment.get("POD_NAMESPACE") or "aim-gpu-sharing"
    parser.add_argument("--namespace", default=default, help="of its Lease (default: $POD_NAMESPACE)")
    parser.add_argument("--watch-namespaces", default="", help="a,b: only workloads of these namespaces (default: all)")
    parser.add_argument("--keep-templates-seconds", type=float, default=600.0, help="of claim templates that no pod uses")
    parser.add_argument("--metrics-port", type=int, default=0, help="of /metrics and the probes (default: none)")
    forms = [form.value for form in PlacementForm]
    parser.add_argument("--placement", choices=forms, help="place gated pods, in this form (default: do not)")
    parser.add_argument("--placement-waiting", default="60s", help="until a pod without a node is let go: 60s, never")
    given = parser.parse_args(arguments)
    chosen = frozenset(filter(None, (name.strip() for name in given.watch_namespaces.split(","))))
    waiting = None if given.placement_waiting == NEVER else parse_duration_ms(given.placement_waiting) / 1000
    return OperatorOptions(
        namespace=given.namespace,
        namespaces=chosen,
        metrics_port=given.metrics_port,
        keep_templates_seconds=given.keep_templates_seconds,
        placement=PlacementForm(given.placement) if given.placement else None,
        waiting_seconds=waiting,
    )
