"""Labels and annotations of a served model's objects. People may write them too: the gateway serves what has the first one."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from aimgpu.kubernetes.vocabulary.names import GROUP

SERVED_MODEL = f"{GROUP}/served-model"  # label: what callers put into "model", as far as a label can hold it
PROGRAM = f"{GROUP}/program"  # label: in its place, of what serves nothing; the gateway leaves it alone
STACK = f"{GROUP}/stack"  # label: which stack it belongs to
MANAGED = {"app.kubernetes.io/managed-by": "aimgpu"}
CACHE = f"{GROUP}/model-cache"  # label of a claim for downloaded models, which outlives the models

NAME = f"{GROUP}/served-model-name"  # annotation, where the label cannot hold the name
MODEL = f"{GROUP}/model"  # annotation: what it is made from; admission sizes by it
ENGINE = f"{GROUP}/engine"
CONCURRENCY = f"{GROUP}/concurrency"
CONTEXT = f"{GROUP}/context"
REPLICAS = f"{GROUP}/replicas"  # how many it has while it is awake
KEEP = f"{GROUP}/keep"  # "10m": scaled to zero when idle for this long; absent: always there
SLO = f"{GROUP}/slo"  # as under `slo:` in the stack file
PRIORITY = f"{GROUP}/qos-priority"
ENTRY = f"{GROUP}/stack-entry"  # what it was made from: its entry of the stack file, as JSON

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_UNFIT = re.compile(r"[^a-z0-9-]+", re.ASCII)
_LONGEST_OBJECT = 52  # a Deployment's pods add 17 characters to it, and a label holds 63


def object_name(model: str) -> str:
    """A name that every kind of object takes; models whose names differ have objects whose names differ."""
    plain = _UNFIT.sub("-", model.lower()).strip("-")
    if plain == model and plain[:1].isalpha() and len(plain) <= _LONGEST_OBJECT:
        return plain
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    start = plain if plain[:1].isalpha() else f"m-{plain}"
    return f"{start[: _LONGEST_OBJECT - 9].strip('-')}-{digest}"


def find_workload(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Which of the two labels it has, and the value: the model or program that it belongs to. None: it belongs to neither."""
    found = item["metadata"].get("labels") or {}
    return next(((key, str(found[key])) for key in (SERVED_MODEL, PROGRAM) if found.get(key)), None)


def label_value(model: str) -> str:
    """The name itself where a label can hold it."""
    return model if _LABEL.fullmatch(model) else object_name(model)
