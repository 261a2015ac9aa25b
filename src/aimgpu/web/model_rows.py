"""The models section: one row for each deployment, with its instances, traffic and promises."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.control.plan.eviction import Resident
from aimgpu.domain import (
    Auto,
    Deployment,
    Footprint,
    Fraction,
    Instance,
    InstanceState,
    Level,
    Memory,
    PartitionKind,
    Want,
    Whole,
)
from aimgpu.sizing.surplus import describe_started
from aimgpu.units import format_bytes, format_ppm
from aimgpu.web.sources import Json, Scores

_ORDER = (
    InstanceState.FAILED,
    InstanceState.LOADING,
    InstanceState.DRAINING,
    InstanceState.QUEUED,
    InstanceState.ENDED,
    InstanceState.READY,
    InstanceState.SLEEPING,
    InstanceState.ABSENT,
)
_RUNNING = "running"  # a program that is ready
_REFUSED = "refused"  # wanted, and no room
_NOT_STARTED = "wanted; no copy has been placed yet"
_ABOUT_TO_START = "has its place; the engine is about to start"


class ModelRows:
    def __init__(
        self,
        seen: Observation,
        *,
        scores: Scores,
        residents: Sequence[Resident],
        waiting: Mapping[str, str],
        footprints: Mapping[str, Footprint],
    ) -> None:
        self._seen = seen
        self._scores: Mapping[str, Any] = scores.get("models", {})
        self._residents = {resident.name: resident for resident in residents}
        self._waiting = waiting
        self._footprints = footprints

    def describe(self) -> list[Json]:
        return [self._row(deployment) for deployment in self._seen.deployments]

    def _row(self, wanted: Deployment) -> Json:
        instances = [one for one in self._seen.instances if one.deployment == wanted.name]
        footprint = self._footprints.get(wanted.name)
        state, reason = self._state(wanted.name, instances)
        granted = [grant for instance in instances for grant in instance.grants]
        measured = [self._seen.measured_bytes(instance.id) for instance in instances]
        known = [size for size in measured if size is not None]
        started = next(
            (one for one in instances if one.sized_bytes is not None and one.state is not InstanceState.SLEEPING), None
        )
        service = describe_started(started) if started else None
        return {
            "name": wanted.name,
            "model": wanted.model,
            "program": shlex.join(wanted.overrides.program.argv) if wanted.overrides.program else None,
            "aliases": list(wanted.aliases),
            "default": wanted.default,
            "engine": instances[0].engine if instances else wanted.engine,
            "precision": footprint.precision if footprint else wanted.precision,
            "context": service.context_tokens if service else footprint.context_tokens if footprint else wanted.context_tokens,
            "concurrency": service.concurrency if service else footprint.concurrency if footprint else wanted.concurrency,
            "unused": service.unused_text if service else None,
            "sharing": wanted.sharing.value,
            "replicas": wanted.replicas,
            "priority": wanted.ask.priority.value,
            "isolation": wanted.ask.isolation.value,
            "gpu": describe_want(wanted.present_ask.want),
            "keep_seconds": wanted.keep_seconds,
            "pinned": wanted.keep_seconds is None,
            "state": _RUNNING if wanted.overrides.program and state == InstanceState.READY else state,
            "reason": reason,
            "percent": next((one.percent for one in instances if one.percent is not None), None),
            "granted_bytes": sum(grant.memory_bytes for grant in granted),
            "measured_bytes": sum(known) if known else None,
            "planned_bytes": started.sized_bytes if started else footprint.total_bytes if footprint else None,
            "level": min((grant.level for grant in granted), key=_rank).value if granted else None,
            "mechanism": ", ".join(dict.fromkeys(grant.mechanism for grant in granted if grant.mechanism)) or None,
            "instances": [self._instance(one) for one in instances],
            **self._residency(wanted),
            **self._traffic(wanted.name),
        }

    def _state(self, name: str, instances: Sequence[Instance]) -> tuple[str, str | None]:
        states = [one.state for one in instances]
        if InstanceState.READY in states:
            return InstanceState.READY.value, _beside_ready(instances)
        if name in self._waiting and not {InstanceState.LOADING, InstanceState.FAILED} & set(states):
            return _REFUSED, self._waiting[name]
        if not instances:
            return InstanceState.QUEUED.value, _NOT_STARTED
        state = next(state for state in _ORDER if state in states)
        reason = next((one.reason for one in instances if one.state is state and one.reason), None)
        return state.value, reason or self._waiting.get(name) or (_ABOUT_TO_START if state is InstanceState.QUEUED else None)

    def _instance(self, one: Instance) -> Json:
        return {
            "id": one.id,
            "replica": one.replica,
            "state": one.state.value,
            "reason": one.reason,
            "percent": one.percent,
            "places": [
                {
                    "gpu": grant.device_id,
                    "partition": grant.partition_id.rpartition("/")[2],
                    "memory_bytes": grant.memory_bytes,
                    "level": grant.level.value,
                    "mechanism": grant.mechanism,
                }
                for grant in one.grants
            ],
            "load_seconds": one.load_ms / 1000 if one.load_ms else None,
            "wake_seconds": one.wake_ms / 1000 if one.wake_ms else None,
            "last_lines": list(one.last_lines),
        }

    def _residency(self, wanted: Deployment) -> Json:
        resident = self._residents.get(wanted.name)
        left = None
        timed = wanted.overrides.program is None  # a program falls asleep for others only
        if timed and resident is not None and resident.keep_seconds is not None and not resident.in_flight:
            left = max(0.0, resident.keep_seconds - resident.idle_seconds)
        return {
            "idle_seconds": resident.idle_seconds if resident else None,
            "sleep_in_seconds": left,
            "wake_seconds": resident.wake_seconds if resident else None,
        }

    def _traffic(self, name: str) -> Json:
        score = self._scores.get(name)
        if score is None:
            return {"traffic": None, "targets": []}
        window = score["windows"][0] if score["windows"] else None
        percentiles = window["percentiles"] if window else {}
        return {
            "traffic": {
                "requests_per_second": window["requests_per_second"] if window else None,
                "tokens_per_second": window["output_tokens_per_second"] if window else None,
                "failures": window["failures"] if window else 0,
                "requests": window["requests"] if window else 0,
                "running": score["in_flight"],
                "slots": score["slots"],
                "waiting": score["waiting"],
                "longest_wait_seconds": score.get("longest_wait_seconds"),
                "recalls": score["recalls"],
                "ttft_p95_seconds": percentiles.get("ttft", {}).get("p95_seconds"),
                "tpot_p95_seconds": percentiles.get("tpot", {}).get("p95_seconds"),
                "latency_p95_seconds": percentiles.get("latency", {}).get("p95_seconds"),
            },
            "targets": list(_targets(score)),
        }


def _beside_ready(instances: Sequence[Instance]) -> str | None:
    """Of a model that answers: copies that failed, and those that start or end, as when its pods are replaced."""
    failed = sum(one.state is InstanceState.FAILED for one in instances)
    if failed:
        return f"{failed} of {len(instances)} copies failed"
    moving = [one for one in instances if one.state not in (InstanceState.READY, InstanceState.SLEEPING)]
    return "; ".join(f"{one.id} is {one.state.value}" + (f": {one.reason}" if one.reason else "") for one in moving) or None


def _targets(score: Mapping[str, Any]) -> list[Json]:
    own = {name: one for name, one in score["classes"].items() if one["own"]}
    shared = [{**target, "class": "others" if own else "all"} for target in score["targets"]]
    return shared + [{**target, "class": name} for name, one in own.items() for target in one["targets"]]


def describe_want(want: Want) -> str:
    """As the stack file writes it."""
    match want:
        case Auto():
            return "auto"
        case Memory(memory_bytes=size):
            return f"memory {format_bytes(size)}"
        case Fraction(ppm=ppm):
            return f"fraction {format_ppm(ppm)}"
        case PartitionKind(kind=kind):
            return f"partition {kind}"
        case Whole(count=count):
            return f"whole {count}"


def _rank(level: Level) -> int:
    return level.rank
