"""What a model would need, where it would go, and what would make it fit, before anything is submitted."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from aimgpu.control.plan.prepared import Prepared, ask_for
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import Auto, Deployment, Footprint, Placement, Refusal
from aimgpu.domain.codec import encode
from aimgpu.errors import AimGpuError, InvalidInput, NotAllowed
from aimgpu.placement import Snapshot, decision_to_json
from aimgpu.placement.decide import decide_all
from aimgpu.placement.explain import explain
from aimgpu.sizing.surplus import describe_service
from aimgpu.web.sources import FoundModel, Json, Sources

_SHORTEST_CONTEXT = 512
_PRECISIONS = ("fp8", "int8", "int4")


def read_deployment(name: object, fields: object) -> Deployment:
    """As a stack file with this one model would be read; raises InvalidStackFile in the stack file's words."""
    if not isinstance(name, str) or not isinstance(fields, Mapping):
        raise InvalidInput("a model needs {name: text, fields: {model: ..., ...}}")
    (deployment,) = parse_stack(json.dumps({"models": {name: dict(fields)}}), source="the form").deployments
    # What a secret is does not change a size: nothing that is merely judged has its files and variables read.
    return replace(deployment, overrides=replace(deployment.overrides, secrets=()))


def refuse_path(deployment: Deployment) -> None:
    """For callers that may not change anything: whether a file exists is not for them. Raises NotAllowed."""
    model, given = deployment.model, deployment.overrides
    looks = bool(given.adapters) or given.server is not None
    if looks or model.startswith(("/", ".", "~")) or "/../" in model or model.lower().endswith(".gguf"):
        raise NotAllowed(
            f"{deployment.name}: a path is read for callers that may make changes only",
            hint="Open the link that `aimgpu web` prints, or name a model of the hub.",
        )


def find_models(sources: Sources, text: str) -> list[Json]:
    """Models with this in their name: what each takes, and whether it would run here now, or why not."""
    snapshot = sources.take_snapshot()
    return [_describe_found(sources, snapshot, found) for found in sources.search(text)]


def _describe_found(sources: Sources, snapshot: Snapshot, found: FoundModel) -> Json:
    one, memory_bytes, reason = found.candidate, None, None
    try:
        prepared = sources.size(read_deployment("candidate", {"model": one.model}))
        (decision,) = decide_all(snapshot, [ask_for(prepared, 0)])
        memory_bytes = prepared.footprint.total_bytes
        reason = decision.summary if isinstance(decision, Refusal) else None
    except AimGpuError as error:
        reason = error.message
    return {
        "name": one.name,
        "model": one.model,
        "engine": one.engine,
        "download_bytes": one.download_bytes,
        "memory_bytes": memory_bytes,
        "on_disk": found.on_disk,
        "runs_here": reason is None,
        "reason": reason,
    }


def check_deployment(sources: Sources, deployment: Deployment) -> Json:
    """The footprint term by term, the decision with a verdict for every GPU, and variants that would take less."""
    prepared = sources.size(deployment)
    snapshot = sources.take_snapshot()
    ask = ask_for(prepared, 0)
    running = [one for one in snapshot.running if snapshot.running[one].deployment == deployment.name]
    for instance_id in running:  # it would be replaced
        snapshot = snapshot.without_instance(instance_id)
    explanation = explain(snapshot, ask)
    return {
        "engine": prepared.engine,
        "footprint": describe_footprint(prepared.footprint),
        "service": None if sources.cluster else _service(prepared, explanation.decision),
        "fits": isinstance(explanation.decision, Placement),
        "decision": decision_to_json(explanation.decision),
        "devices": encode(explanation.devices),
        "replaces": running,
        "copies": _copies(snapshot, prepared),
        "variants": list(_variants(sources, snapshot, prepared)),
    }


def _service(prepared: Prepared, decision: Placement | Refusal) -> Json | None:
    """What its grant would be good for."""
    if not isinstance(decision, Placement):
        return None
    service = describe_service(prepared.footprint, min((slot.memory_bytes for slot in decision.slots), default=0))
    return {"text": service.text, "unused": service.unused_text}


def describe_footprint(footprint: Footprint) -> Json:
    return {
        "total_bytes": footprint.total_bytes,
        "exactness": footprint.exactness.value,
        "precision": footprint.precision,
        "context": footprint.context_tokens,
        "concurrency": footprint.concurrency,
        "terms": [
            {
                "name": term.name,
                "memory_bytes": term.memory_bytes,
                "exactness": term.exactness.value,
                "formula": term.formula,
                "inputs": {name: str(value) for name, value in term.inputs.items()},
            }
            for term in footprint.terms
        ],
        "notes": list(footprint.notes),
        "flags": dict(footprint.flags),
    }


def _copies(snapshot: Snapshot, prepared: Prepared, most: int = 16) -> int:
    """How many copies would fit beside what runs, counted up to `most`."""
    asks = [ask_for(prepared, number) for number in range(most)]
    return sum(isinstance(decision, Placement) for decision in decide_all(snapshot, asks))


def _variants(sources: Sources, snapshot: Snapshot, prepared: Prepared) -> Iterator[Json]:
    """Smaller wishes, each alone, with what they would need and whether that fits now."""
    wanted, footprint = prepared.deployment, prepared.footprint
    for change, fields, variant in _smaller(wanted, footprint):
        try:
            sized = sources.size(variant)
        except AimGpuError:
            continue
        if sized.footprint.total_bytes >= footprint.total_bytes:
            continue
        (decision,) = decide_all(snapshot, [ask_for(sized, 0)])
        yield {
            "change": change,
            "fields": fields,
            "total_bytes": sized.footprint.total_bytes,
            "fits": isinstance(decision, Placement),
        }


def _smaller(wanted: Deployment, footprint: Footprint) -> Iterator[tuple[str, dict[str, Any], Deployment]]:
    sized = replace(wanted, ask=replace(wanted.ask, want=Auto()))  # a size that was asked for would hide what it needs
    for divisor in (2, 4):
        context = footprint.context_tokens // divisor
        if context >= _SHORTEST_CONTEXT:
            yield f"context {context}", {"context": context}, replace(sized, context_tokens=context)
    if footprint.concurrency > 1:
        fewer = footprint.concurrency // 2
        yield f"concurrency {fewer}", {"concurrency": fewer}, replace(sized, concurrency=fewer)
    for precision in _PRECISIONS:
        if precision != footprint.precision:
            yield f"precision {precision}", {"precision": precision}, replace(sized, precision=precision)
