"""What `--json` of commands prints: every key and what it holds. The tests compare these with answers, docs list them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_NAMES: dict[object, str] = {str: "text", int: "whole number", float: "number", bool: "true or false", object: "any"}


@dataclass(frozen=True, slots=True)
class Maybe:
    """A value of this shape, or null."""

    shape: Any


@dataclass(frozen=True, slots=True)
class ByName:
    """An object with names of its own for keys, each with a value of this shape."""

    shape: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`example`: a command line that prints such an answer where no daemon runs; none: it needs one."""

    command: str
    shape: Any
    example: str | None = None


_PARTITION = {
    "id": str,
    "kind": str,
    "memory_bytes": int,
    "compute_units": Maybe(int),
    "render_node": Maybe(str),
    "uuid": Maybe(str),
    "granted_bytes": Maybe(int),
    "measured_bytes": Maybe(int),
    "foreign_bytes": int,
    "free_bytes": int,
    "level_alone": str,
    "level_shared": str,
}
_GPU = {
    "id": str,
    "index": int,
    "vendor": str,
    "product": str,
    "market_name": Maybe(str),
    "simulated": bool,
    "software": bool,
    "layout": str,
    "compute_mode": Maybe(str),
    "memory_mode": Maybe(str),
    "pending_memory_mode": Maybe(str),
    "layouts": [str],
    "hive": Maybe(str),
    "memory_bytes": int,
    "compute_units": Maybe(int),
    "measured_bytes": Maybe(int),
    "utilization_percent": Maybe(int),
    "partitions": [_PARTITION],
    "processes": [object],
}
GPUS = {"simulated": bool, "daemon": bool, "stranded": [str], "gpus": [_GPU], "findings": [object]}
_PARTS = {"partitions": [{"kind": str, "memory_bytes": int, "compute_units": Maybe(int)}], "what": str}
_LAYOUT = {"name": str, "current": bool, "needs_reload": bool, **_PARTS}
LAYOUTS = {
    "simulated": bool,
    "gpus": [
        {
            "id": str,
            "index": int,
            "product": str,
            "simulated": bool,
            "software": bool,
            "layout": str,
            "layouts": [_LAYOUT],
            "profiles": [object],
        }
    ],
}
LAYOUT_CHANGE = {
    "device": str,
    "before": str,
    "after": str,
    "devices": [str],
    "idle": [str],
    "needs_reload": bool,
    "stops": [str],
    "returns": [str],
    "does_not_fit": [{"instance": str, "why": str}],
    "partitions_before": Maybe(_PARTS),
    "partitions_after": Maybe(_PARTS),
    "simulated": bool,
    "in_the_way": [object],
}
_COMPUTE = Maybe({"ppm": int, "units": Maybe(int), "of": Maybe(int), "text": str})
_PLAIN_SLOT = {
    "node": str,
    "device_id": str,
    "partition_id": str,
    "memory_bytes": int,
    "compute_ppm": Maybe(int),
    "exclusive": bool,
}
_SLOT = {**_PLAIN_SLOT, "compute": _COMPUTE}
_SERVICE = {
    "engine": str,
    "granted_bytes": int,
    "concurrency": int,
    "context_tokens": int,
    "kv_cache_bytes": int,
    "kv_tokens": Maybe(int),
    "unused_bytes": int,
    "in_host_memory": bool,
}
PLAN = {
    "simulated": bool,
    "fits": bool,
    "because": str,
    "cost": ByName(object),
    "steps": [{"kind": str, "node": str, "device": Maybe(str), "layout": Maybe(str), "reload_driver": bool, "text": str}],
    "placements": [{"ask": str, "slots": [_SLOT], "because": str, "service": Maybe(_SERVICE)}],
    "refusals": [object],
    "notes": [str],
}
EXPLANATIONS = [
    {
        "ask": ByName(object),
        "decision": ByName(object),
        "first": [object],
        "devices": [
            {
                "node": str,
                "device_id": str,
                "verdict": str,
                "text": str,
                "loss": Maybe(int),
                "short_bytes": Maybe(int),
            }
        ],
        "mix_shapes": int,
    }
]
CAPACITY = {
    "product": str,
    "devices": int,
    "bound": int,
    "proven_best": bool,
    "layouts": [str],
    "placements": [{"ask": str, "slots": [_PLAIN_SLOT], "because": str}],
}
_FIT = {
    "layout": str,
    "compute_mode": Maybe(str),
    "memory_mode": Maybe(str),
    "kind": str,
    "memory_bytes": int,
    "compute_units": Maybe(int),
    "partitions": int,
    "copies": int,
}
SIZE = {
    "model": str,
    "engine": str,
    "engine_version": Maybe(str),
    "precision": str,
    "context_tokens": int,
    "concurrency": int,
    "source": str,
    "total_bytes": int,
    "exactness": str,
    "terms": [{"name": str, "memory_bytes": int, "exactness": str, "formula": str, "inputs": ByName(object)}],
    "flags": ByName(str),
    "fits": {
        "product": str,
        "device_bytes": int,
        "whole": bool,
        "fraction_ppm": Maybe(int),
        "copies_per_device": int,
        "partitions": [_FIT],
        "devices_needed": Maybe(int),
        "bytes_per_device": int,
    },
    "savings": [{"change": str, "total_bytes": int, "saved_bytes": int, "whole": bool}],
    "notes": [str],
    "gpu": {"product": str, "memory_bytes": int, "simulated": bool},
    "service": _SERVICE,
}
_RETRY = {"failures": int, "next_try_seconds": Maybe(float), "gave_up": bool, "ends_on": str}
_INSTANCE = {
    "id": str,
    "name": str,
    "model": str,
    "engine": str,
    "launcher": str,
    "replica": int,
    "device": Maybe(str),
    "device_name": Maybe(str),
    "partition": Maybe(str),
    "memory_bytes": Maybe(int),
    "level": Maybe(str),
    "mechanism": Maybe(str),
    "compute": Maybe(str),
    "grants": [
        {
            "id": str,
            "device": str,
            "partition": str,
            "memory_bytes": int,
            "compute_ppm": Maybe(int),
            "compute": _COMPUTE,
            "exclusive": bool,
            "level": str,
            "mechanism": Maybe(str),
        }
    ],
    "priority": Maybe(str),
    "state": str,
    "pid": Maybe(int),
    "end": Maybe({"exit_code": Maybe(int), "granted_bytes": int, "peak_bytes": Maybe(int), "seconds": int}),
    "percent": Maybe(int),
    "stage": Maybe(str),
    "service": [str],
    "concurrency": Maybe(int),
    "context_tokens": Maybe(int),
    "kv_tokens": Maybe(int),
    "kv_cache_bytes": Maybe(int),
    "unused_bytes": Maybe(int),
    "in_host_memory": bool,
    "reason": Maybe(str),
    "retry": Maybe(_RETRY),
    "last_lines": [str],
    "endpoint": Maybe(str),
}
_STATUS_PARTITION = {
    "id": str,
    "kind": str,
    "memory_bytes": int,
    "granted_bytes": int,
    "free_bytes": int,
    "compute_units": Maybe(int),
}
_STATUS_GPU = {
    "id": str,
    "index": int,
    "product": str,
    "name": str,
    "vendor": str,
    "layout": str,
    "simulated": bool,
    "software": bool,
    "memory_bytes": int,
    "granted_bytes": int,
    "free_bytes": int,
    "measured_bytes": Maybe(int),
    "utilization_percent": Maybe(int),
    "partitions": [_STATUS_PARTITION],
}
STATUS = {
    "simulated": bool,
    "version": str,
    "pid": int,
    "deployments": [
        {
            "name": str,
            "replicas": int,
            "aliases": [str],
            "default": bool,
            "adapters": [str],
            "command": Maybe(str),
            "residence": Maybe(str),
        }
    ],
    "gpus": [_STATUS_GPU],
    "instances": [_INSTANCE],
    "waiting": [{"name": str, "model": str, "priority": str, "replicas": int, "reason": str, **_RETRY}],
    "models_url": str,
    "page_url": str,
    "notes": [str],
    "queue": ByName(object),
    "sharing": ByName(object),
    "reconciled": bool,
}
ANSWERS = (
    Answer(command="aimgpu ps", shape=STATUS),
    Answer(command="aimgpu gpus", shape=GPUS, example="gpus --gpu MI300X"),
    Answer(command="aimgpu partition list", shape=LAYOUTS, example="partition list --gpu MI300X"),
    Answer(command="aimgpu partition plan", shape=LAYOUT_CHANGE, example="partition plan 0 CPX --gpu MI300X"),
    Answer(command="aimgpu size", shape=SIZE, example="size Qwen/Qwen3-8B --gpu MI300X"),
    Answer(command="aimgpu plan", shape=PLAN, example="plan --gpu MI300X"),
    Answer(command="aimgpu explain", shape=EXPLANATIONS, example="explain chat --gpu MI300X"),
    Answer(command="aimgpu capacity", shape=CAPACITY, example="capacity --gpu MI300X"),
    Answer(
        command="aimgpu doctor",
        shape={"findings": [{"topic": str, "verdict": str, "text": str, "action": Maybe(str)}], "problems": int},
        example="doctor --port 0",
    ),
    Answer(command="aimgpu version", shape={"version": str, "python": str, "machine": str}, example="version"),
)


def check_shape(value: Any, shape: Any, where: str = "answer") -> None:  # noqa: ANN401 - JSON
    """Every key that is there, no other, each of its kind. Raises AssertionError."""
    if isinstance(shape, Maybe):
        if value is not None:
            check_shape(value, shape.shape, where)
    elif isinstance(shape, list):
        assert isinstance(value, list), where  # noqa: S101 - for tests
        for index, item in enumerate(value):
            check_shape(item, shape[0], f"{where}[{index}]")
    elif isinstance(shape, ByName):
        assert isinstance(value, dict), where  # noqa: S101
        for key, item in value.items():
            check_shape(item, shape.shape, f"{where}.{key}")
    elif isinstance(shape, Mapping):
        assert isinstance(value, dict), where  # noqa: S101
        assert value.keys() == shape.keys(), f"{where}: {set(value) ^ set(shape)}"  # noqa: S101
        for key, item in value.items():
            check_shape(item, shape[key], f"{where}.{key}")
    else:
        assert isinstance(value, shape), f"{where} is {value!r}"  # noqa: S101
        assert shape is not int or not isinstance(value, bool), where  # noqa: S101


def page() -> str:
    """docs/reference/json.md."""
    lines = [
        "# JSON answers",
        "",
        "What `--json` prints to stdout on this machine, by command. `[]` stands for each entry of a list, `.*` for each key",
        "of an object whose keys are names. Every key of a table is always there. Sizes are bytes, `_ppm` are millionths.",
        "",
        'An error is `{"error": {"code", "message", "hint"}}` on stderr, with one of [these codes](errors.md), and a',
        "`page_hint` where the page would advise something else. Other commands take `--json` too; their keys may change.",
    ]
    for answer in ANSWERS:
        lines += ["", f"## `{answer.command}`", "", "| key | value |", "| --- | --- |"]
        lines += [f"| `{path}` | {value} |" for path, value in _rows(answer.shape, "")]
    return "\n".join([*lines, ""])


def _rows(shape: Any, path: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - a shape
    inner, nullable = (shape.shape, " or null") if isinstance(shape, Maybe) else (shape, "")
    if isinstance(inner, Mapping):
        if nullable:
            yield path, f"object{nullable}"
        for key, below in inner.items():
            yield from _rows(below, f"{path}.{key}" if path else key)
    elif isinstance(inner, list):
        if isinstance(inner[0], Mapping):
            yield from _rows(inner[0], f"{path}[]")
        else:
            yield path, f"list of {_NAMES[inner[0]]}{nullable}"
    elif isinstance(inner, ByName):
        yield f"{path}.*", f"{_NAMES[inner.shape]}{nullable}"
    else:
        yield path, f"{_NAMES[inner]}{nullable}"
