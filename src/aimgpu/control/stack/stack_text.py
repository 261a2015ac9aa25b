"""The stack file for what is deployed now, written so that `aimgpu up` reads it back as the same deployments.

What is shown has the values of variables masked; where it replaces what is deployed they are kept.
"""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from aimgpu.control.stack.overrides import MASKED
from aimgpu.control.stack.stack_file import DEFAULT_SIMULATED_PRODUCT
from aimgpu.domain import (
    Adapter,
    Ask,
    Auto,
    Deployment,
    Device,
    EngineOverrides,
    Fraction,
    IsolationRequirement,
    Memory,
    PartitionKind,
    Priority,
    RestartPolicy,
    SecretKind,
    ServerProgram,
    ServiceObjective,
    Sharing,
    Spread,
    UserProgram,
    WatchdogPolicy,
    Whole,
)
from aimgpu.domain.objective import MEASURES, PERCENTS
from aimgpu.units import GIB, KIB, MIB, format_duration_ms, format_ppm

_SOURCES = {SecretKind.FILE: "from_file", SecretKind.VARIABLE: "from_variable"}
_SMALLEST = "models: {}\n"


def write_stack(deployments: Iterable[Deployment], devices: Sequence[Device] = ()) -> str:
    """YAML; a deployment's fields in the order in which the documentation names them, defaults left out.

    Of `devices` those that only a stack file could have asked for are named in it: simulated ones, other than the one that a
    machine without a GPU gets.
    """
    found = [one for one in deployments if not one.has_caller]  # which nobody else can start
    models = {one.name: write_fields(one, masked=True) for one in found if one.overrides.program is None}
    programs = {one.name: write_fields(one, masked=True) for one in found if one.overrides.program is not None}
    if not found:
        return _SMALLEST
    products = [device.product for device in devices if device.simulated]
    asked_for = products and products != [DEFAULT_SIMULATED_PRODUCT]
    gpus = {"gpus": {"simulated": products[0], "count": len(products)}} if asked_for else {}
    written = {**gpus, **({"models": models} if models else {}), **({"programs": programs} if programs else {})}
    return yaml.safe_dump(written, sort_keys=False, width=120)


def write_fields(one: Deployment, *, masked: bool = False) -> dict[str, Any]:
    """One entry of the stack file, as a form can change it and send it back. `masked`: for people to see."""
    ask = one.present_ask
    program = one.overrides.program
    fields: dict[str, Any] = {
        "model": one.model if program is None else None,
        "aliases": list(one.aliases) or None,
        "default": True if one.default else None,
        "engine": one.engine if program is None else None,
        "precision": one.precision,
        "context": one.context_tokens,
        "concurrency": one.concurrency,
        "gpu": _gpu(ask),
        "compute": format_ppm(ask.compute_ppm) if ask.compute_ppm is not None else None,
        "isolation": ask.isolation.value if ask.isolation is not IsolationRequirement.NONE else None,
        "place": _place(ask) or None,
        "host": _host(ask) or None,
        "priority": ask.priority.value,
        "slo": _objective(one.objective) if one.objective else None,
        "replicas": one.replicas if one.replicas != 1 else None,
        "keep": None
        if program is not None
        else "always"
        if one.keep_seconds is None
        else format_duration_ms(one.keep_seconds * 1000),
        "preemptible": True if program is not None and one.keep_seconds is not None else None,
        "sleep": None if one.sleeps_in_place else "stop",
        "launcher": one.launcher if one.launcher != "process" else None,
        "prepared": None if one.prepared else "off",
        "watchdog": one.watchdog.value if one.watchdog is not WatchdogPolicy.WARN else None,
        "sharing": one.sharing.value if one.sharing is not Sharing.STRICT else None,
        "adapters": {each.key: _adapter(each, one.name) for each in one.overrides.adapters} or None,
        **_overrides(one.overrides, masked=masked),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _overrides(given: EngineOverrides, *, masked: bool) -> dict[str, Any]:
    """Where a secret is, never what it is."""
    arguments = {flag: list(values) if values else True for flag, *values in given.arguments}
    environment: dict[str, Any] = {name: MASKED if masked else value for name, value in given.environment}
    environment |= {one.name: {_SOURCES[one.kind]: one.source} for one in given.secrets}
    return {
        **_server(given.server),
        **_program(given.program),
        "args": arguments or None,
        "env": environment or None,
        "image": given.image,
    }


def _adapter(one: Adapter, model: str) -> str | dict[str, Any]:
    beside = {
        "name": one.name if one.name != f"{model}:{one.key}" else None,
        "priority": one.priority.value if one.priority else None,
        "slo": _objective(one.objective) if one.objective else None,
    }
    given = {name: value for name, value in beside.items() if value is not None}
    return {"path": one.path, **given} if given else one.path


def _program(given: UserProgram | None) -> dict[str, Any]:
    if given is None:
        return {}
    return {
        "command": list(given.argv) if len(given.argv) > 1 else shlex.join(given.argv),
        "directory": given.directory,
        "after": list(given.after) or None,
        "restart": given.restart.value if given.restart is not RestartPolicy.NEVER else None,
    }


def _server(given: ServerProgram | None) -> dict[str, Any]:
    if given is None:
        return {}
    return {
        "command": list(given.argv) if len(given.argv) > 1 else shlex.join(given.argv),
        "directory": given.directory,
        "health": given.health if given.health != ServerProgram.HEALTH else None,
        "models": list(given.models) or None,
        "ready_timeout": None if given.ready_seconds is None else format_duration_ms(given.ready_seconds * 1000),
    }


def _gpu(ask: Ask) -> Any:  # noqa: ANN401 -- a word or a mapping, as YAML has it
    found: dict[str, Any] = {}
    match ask.want:
        case Memory(memory_bytes=size):
            found = {"memory": _size(size)}
        case Fraction(ppm=ppm):
            found = {"fraction": format_ppm(ppm)}
        case PartitionKind(kind=kind):
            found = {"partition": kind}
        case Whole(count=count):
            return {"whole": count}
        case Auto():
            pass
    if ask.devices != 1:
        found["devices"] = ask.devices
    return found or "auto"


def _size(count: int) -> str:
    """Exact, in the largest unit that divides it."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count % factor == 0:
            return f"{count // factor}{unit}"
    return f"{count}B"


def _place(ask: Ask) -> dict[str, Any]:
    found: dict[str, Any] = {
        "products": sorted(ask.products),
        "not_products": sorted(ask.refused_products),
        "vendor": ask.vendor,
        "not_vendor": ask.refused_vendor,
        "spread": True if ask.spread is Spread.SPREAD else None,
        "with": sorted(ask.with_deployments),
        "not_with": sorted(ask.not_with_deployments),
        "partition": ask.partition_id,
        "pinned": True if ask.pinned else None,
    }
    return {name: value for name, value in found.items() if value}


def _host(ask: Ask) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if ask.cpu_millis:
        found["cpu"] = f"{ask.cpu_millis}m"
    if ask.host_memory_bytes:
        found["memory"] = _size(ask.host_memory_bytes)
    return found


def _objective(objective: ServiceObjective) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for measure in MEASURES:
        for percent in PERCENTS:
            milliseconds = getattr(objective, f"{measure}_p{percent}_ms")
            if milliseconds is not None:
                found[f"{measure}_p{percent}"] = format_duration_ms(milliseconds)
    if objective.tokens_per_second is not None:
        found["throughput"] = f"{objective.tokens_per_second}tok/s"
    if objective.availability_ppm is not None:
        found["availability"] = format_ppm(objective.availability_ppm)
    own = {priority.value: objective.own_of(priority) for priority in Priority}
    classes = {name: _objective(one) for name, one in own.items() if one is not None}
    return found | ({"classes": classes} if classes else {})
