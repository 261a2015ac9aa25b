"""The configuration of the device plugin: NVIDIA's format (``version: v1``), for AMD GPUs too.

    version: v1
    flags: {migStrategy: mixed}            # none | single | mixed; also how AMD partitions are named
    sharing:
      timeSlicing:                         # or mps, which gives each replica its part of the compute too
        renameByDefault: false             # true: amd.com/gpu.shared
        failRequestsGreaterThanOne: true
        resources:
        - {name: amd.com/gpu, replicas: 4}                       # all GPUs
        - {name: nvidia.com/gpu, replicas: 8, devices: [0, 2]}   # these only; NVIDIA's plugin ignores `devices`
    aim: {placement: packed, isolation: enforced, sameGpu: false}   # ours; NVIDIA's plugin ignores it

Validation is that of NVIDIA's plugin 0.19: the same files are refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from aimgpu.domain import IsolationRequirement, Spread
from aimgpu.errors import InvalidInput

VERSION = "v1"
LONGEST_NAME = 63
SHARED_SUFFIX = ".shared"
_NVIDIA, _AMD = "nvidia.com", "amd.com"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_AMD_NAME = re.compile(r"[a-z0-9]([-_.a-z0-9]*[a-z0-9])?")  # AMD's own names have an underscore: cpx_nps4
_INDEX = re.compile(r"[0-9]+(:[0-9]+)?")
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_REFERENCE = re.compile(rf"GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+")
_LEAST_REPLICAS = 2
_Choice = TypeVar("_Choice", bound=StrEnum)


class Strategy(StrEnum):
    """How partitions are named."""

    NONE = "none"  # whole GPUs only (AMD: partitions are all there is, and are called gpu)
    SINGLE = "single"  # nvidia.com/gpu, amd.com/gpu
    MIXED = "mixed"  # nvidia.com/mig-1g.18gb, amd.com/cpx_nps4


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    name: str
    replicas: int
    rename: str | None = None
    devices: tuple[str, ...] | int | None = None  # indices or UUIDs, how many, or all

    @property
    def advertised(self) -> str:
        return self.rename or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig:
    strategy: Strategy = Strategy.NONE
    replicated: tuple[Replicated, ...] = ()
    fail_requests_greater_than_one: bool = False
    mps: bool = False
    placement: Spread = Spread.SPREAD
    isolation: IsolationRequirement = IsolationRequirement.NONE
    same_gpu: bool = False  # whether a container may have several replicas of one GPU
    cdi: bool = False  # name CDI devices instead of listing device nodes and mounts
    notes: tuple[str, ...] = field(default=())


def read_config(path: Path) -> SharingConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    return parse_config(text)


def parse_config(text: str) -> SharingConfig:
    """Raises InvalidInput with the rule that is broken."""
    try:
        config = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InvalidInput(f"the configuration is not YAML: {error}") from error
    if not isinstance(config, Mapping):
        raise InvalidInput("the configuration is not a mapping")
    version = config.get("version") or VERSION
    if version != VERSION:
        raise InvalidInput(f"unknown version: {version}", hint="Write version: v1.")
    flags, sharing, own = (_mapping(config, name) for name in ("flags", "sharing", "aim"))
    slicing, mps = _replicated_of(sharing, "timeSlicing"), _replicated_of(sharing, "mps")
    chosen = mps if mps is not None else slicing
    strategy = _choose(Strategy, flags.get("migStrategy", "none"), "flags.migStrategy")
    if mps is not None and strategy is Strategy.MIXED:
        raise InvalidInput("migStrategy mixed is not supported with mps", hint="Write migStrategy single, or use timeSlicing.")
    unknown = sorted(set(own) - {"placement", "isolation", "sameGpu", "cdi"})
    if unknown:
        raise InvalidInput(f"aim has the unknown field {unknown[0]!r}", hint="Fields: placement, isolation, sameGpu, cdi.")
    return SharingConfig(
        strategy=strategy,
        replicated=chosen[0] if chosen else (),
        # With MPS NVIDIA's plugin always refuses more than one.
        fail_requests_greater_than_one=mps is not None or bool(chosen and chosen[1]),
        mps=mps is not None,
        placement={"packed": Spread.PACK, "spread": Spread.SPREAD}[_one_of(own, "placement", "spread", ("packed", "spread"))],
        isolation=_choose(IsolationRequirement, own.get("isolation", "none"), "aim.isolation"),
        same_gpu=_boolean(own, "sameGpu"),
        cdi=_boolean(own, "cdi"),
    )


_PLACES: dict[str, tuple[str, ...]] = {
    "": ("version", "flags", "resources", "sharing", "imex", "health", "aim"),
    "sharing": ("timeSlicing", "mps"),
    "sharing.timeSlicing": ("renameByDefault", "failRequestsGreaterThanOne", "resources"),
    "sharing.mps": ("renameByDefault", "failRequestsGreaterThanOne", "resources"),
    "flags": (
        "migStrategy",
        "failOnInitError",
        "mpsRoot",
        "nvidiaDriverRoot",
        "nvidiaDevRoot",
        "gdrcopyEnabled",
        "gdsEnabled",
        "mofedEnabled",
        "useNodeFeatureAPI",
        "deviceDiscoveryStrategy",
        "plugin",
        "gfd",
    ),
}
_ENTRY = ("name", "replicas", "rename", "devices")


def unread_fields(text: str) -> list[str]:
    """Fields of a configuration that a plugin overlooks in silence, with where they belong if that is known."""
    config = yaml.safe_load(text) or {}
    found = []
    for place, known in _PLACES.items():
        block: Any = config
        for name in filter(None, place.split(".")):
            block = block.get(name) if isinstance(block, Mapping) else None
        if not isinstance(block, Mapping):
            continue
        found += [_overlooked(f"{place}.{name}".lstrip("."), str(name)) for name in block if name not in known]
        if place.startswith("sharing."):
            entries = [one for one in block.get("resources") or () if isinstance(one, Mapping)]
            found += [
                _overlooked(f"{place}.resources.{name}", str(name)) for one in entries for name in one if name not in _ENTRY
            ]
    return found


def _overlooked(path: str, name: str) -> str:
    homes = [place for place, known in _PLACES.items() if name in known]
    if homes:
        return f"{path} is not read there; {name} belongs under {' or '.join(homes) or 'the top'}"
    near = get_close_matches(name, [*_ENTRY, *(each for known in _PLACES.values() for each in known)], 1)
    return f"{path} is not known" + (f": did you mean {near[0]}?" if near else "")


def _replicated_of(sharing: Mapping[str, Any], name: str) -> tuple[tuple[Replicated, ...], bool] | None:
    if name not in sharing or sharing[name] is None:
        return None
    block = _mapping(sharing, name)
    rename_by_default, fail = _boolean(block, "renameByDefault"), _boolean(block, "failRequestsGreaterThanOne")
    entries = block.get("resources")
    if not entries:
        raise InvalidInput(f"sharing.{name}: no resources specified")
    if not isinstance(entries, list):
        raise InvalidInput(f"sharing.{name}.resources is not a list")
    return tuple(_replicated(entry, rename_by_default=rename_by_default) for entry in entries), fail


def _replicated(entry: object, *, rename_by_default: bool) -> Replicated:
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise InvalidInput("no resource name specified")
    name = resource_name(entry["name"])
    devices = _devices(entry.get("devices", "all"))
    if "replicas" not in entry:
        near = [key for key in entry if key not in _ENTRY and get_close_matches(str(key), ["replicas"], 1)]
        hint = f"It has {near[0]}: write replicas." if near else None
        raise InvalidInput(f"{name}: no replicas specified", hint=hint)
    replicas = entry["replicas"]
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise InvalidInput(f"{name}: replicas is not a whole number: {replicas!r}")
    if replicas < _LEAST_REPLICAS:
        raise InvalidInput(f"{name}: number of replicas must be >= 2")
    rename = resource_name(entry["rename"]) if "rename" in entry else None
    if rename is None and rename_by_default:
        rename = name + SHARED_SUFFIX
    return Replicated(name=name, replicas=replicas, rename=rename, devices=devices)


def resource_name(name: object) -> str:
    """Fully qualified; without a vendor it is NVIDIA's, as in NVIDIA's plugin."""
    if not isinstance(name, str):
        raise InvalidInput(f"{name!r} is not the name of a resource")
    full = name if name.startswith((f"{_NVIDIA}/", f"{_AMD}/")) else f"{_NVIDIA}/{name}"
    if len(full) > LONGEST_NAME:
        raise InvalidInput(f"fully-qualified resource name must be {LONGEST_NAME} characters or less: {full}")
    vendor, _, short = full.partition("/")
    if not (_AMD_NAME if vendor == _AMD else _SUBDOMAIN).fullmatch(short):
        raise InvalidInput(
            f"incorrect format for resource name {full!r}", hint="Names look like amd.com/gpu or nvidia.com/gpu."
        )
    return full


def _devices(value: object) -> tuple[str, ...] | int | None:
    if value == "all":
        return None
    if isinstance(value, str):
        raise InvalidInput(f"devices set as {value!r} but the only valid string input is 'all'")
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise InvalidInput(f"devices set as {value} but a count of devices must be > 0")
        return value
    if not isinstance(value, list):
        raise InvalidInput(f"unrecognized type for devices spec: {value!r}")
    found = []
    for item in value:
        text = str(item)
        if isinstance(item, bool) or not (_INDEX.fullmatch(text) or _REFERENCE.fullmatch(text)):
            raise InvalidInput(f"unsupported device in devices list: {item!r}", hint="Write an index (0, 0:1) or a UUID.")
        found.append(text)
    return tuple(found)


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name} is not a mapping")
    return value


def _boolean(block: Mapping[str, Any], name: str) -> bool:
    value = block.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}, not true or false")
    return value


def _one_of(block: Mapping[str, Any], name: str, default: str, options: tuple[str, ...]) -> str:
    value = block.get(name, default)
    if value not in options:
        raise InvalidInput(f"{name} cannot be {value!r}", hint=f"It can be {', '.join(options)}.")
    return str(value)


def _choose(kind: type[_Choice], value: object, name: str) -> _Choice:
    try:
        return kind(str(value))
    except ValueError as error:
        raise InvalidInput(f"{name} cannot be {value!r}", hint=f"It can be {', '.join(kind)}.") from error
