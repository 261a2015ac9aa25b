"""The stack file: text in, frozen `Stack` out, or a complaint that names the line, the key and the nearest right one."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.control.stack.adapters import ADAPTERS, read_adapters
from aimgpu.control.stack.names import find_clash, read_aliases
from aimgpu.control.stack.overrides import OVERRIDE_KEYS, read_overrides
from aimgpu.control.stack.place import HOST_KEYS, PLACE_KEYS, read_host, read_place
from aimgpu.control.stack.program import PROGRAM_KEYS, find_unreachable, read_keep_seconds, read_program
from aimgpu.control.stack.queue import QUEUE_KEYS, read_queue
from aimgpu.control.stack.server import COMMAND, SERVER_KEYS, read_server
from aimgpu.control.stack.slo import SLO_KEYS, read_objective
from aimgpu.control.stack.yaml_nodes import YamlNode, parse_yaml
from aimgpu.domain import (
    PROGRAM,
    Ask,
    Auto,
    Deployment,
    Fraction,
    IsolationRequirement,
    Memory,
    PartitionKind,
    Priority,
    QueueSettings,
    ServiceObjective,
    Sharing,
    Want,
    WatchdogPolicy,
    Whole,
)
from aimgpu.engines.command.presets import PRESETS
from aimgpu.errors import InvalidQuantity, InvalidStackFile, UnknownProduct
from aimgpu.files import read_bounded
from aimgpu.units import parse_bytes, parse_duration_ms, parse_ppm

ENGINES = (COMMAND, "llamacpp", "ollama", "vllm", *PRESETS)
LAUNCHERS = ("process", "docker")
SLEEPS = ("auto", "stop")
PREPARED = ("auto", "off")
LARGEST_FILE = 4 << 20

_MODEL_KEYS = (
    "model",
    "aliases",
    "default",
    "engine",
    "precision",
    "context",
    "concurrency",
    "gpu",
    "compute",
    "isolation",
    "place",
    "host",
    "priority",
    "slo",
    "replicas",
    "keep",
    "sleep",
    "launcher",
    "prepared",
    "watchdog",
    "sharing",
    ADAPTERS,
    *SERVER_KEYS,
    *OVERRIDE_KEYS,
)
_PROGRAM_KEYS = (
    *PROGRAM_KEYS,
    "gpu",
    "compute",
    "isolation",
    "place",
    "host",
    "priority",
    "replicas",
    "launcher",
    "watchdog",
    "sharing",
    "env",
    "image",
)
_WANT_KEYS = ("memory", "fraction", "partition", "whole")
_BELONGS = (
    dict.fromkeys(PLACE_KEYS, "place")
    | dict.fromkeys(HOST_KEYS, "host")
    | dict.fromkeys((*_WANT_KEYS, "devices"), "gpu")
    | dict.fromkeys(SLO_KEYS, "slo")
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_MODE = re.compile("[SDTQC]PX", re.IGNORECASE)
_ALWAYS = ("forever", "for ever", "true", "yes", "on", "infinite", "-1")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}", re.ASCII)


DEFAULT_SIMULATED_PRODUCT = "MI300X"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """Which GPUs to use. `simulated` None: those of this machine, or one simulated MI300X where there are none."""

    simulated: str | None = None  # a product, as the user wrote it; the hardware room knows them
    count: int = 1
    software: bool = False  # by the software GPU's driver: programs run on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack file that was read."""

    gpus: GpuChoice
    deployments: tuple[Deployment, ...]
    queue: QueueSettings | None = None  # None: as it is


def read_stack_text(path: Path) -> str:
    """The text of a stack file, bounded, as UTF-8."""
    hint = "Name the file with --file. `aimgpu up --example` needs none, and `aimgpu up smollm2` neither."
    try:
        return decode_stack(read_bounded(path, LARGEST_FILE), str(path))
    except OSError as error:
        raise InvalidStackFile(f"cannot read {path}: {error.strerror}", hint=hint) from error


def decode_stack(data: bytes, source: str) -> str:
    """UTF-8, with or without the mark that some editors write."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidStackFile(f"{source} is not UTF-8 text", hint="Save it as UTF-8.") from error


def parse_stack(
    text: str,
    *,
    source: str = "stack file",
    base_directory: Path | None = None,
    check_product: Callable[[str], object] = str,
) -> Stack:
    """What the text says, or InvalidStackFile. `base_directory` makes relative model paths absolute.

    `check_product` raises UnknownProduct for a GPU that cannot be simulated; the hardware room knows which can.
    """
    root = parse_yaml(text, source)
    belongs = dict.fromkeys(_MODEL_KEYS, "models: NAME") | dict.fromkeys(QUEUE_KEYS, "queue")
    fields = root.fields(("gpus", "queue", "models", "programs"), "a mapping with 'models' in it", belongs)
    if not {"models", "programs"} & fields.keys():
        raise root.complaint("there is no 'models'", "A smallest stack: models: {chat: {model: MODEL}}")
    models = fields["models"].entries("a mapping from names to models") if "models" in fields else {}
    programs = fields["programs"].entries("a mapping from names to programs") if "programs" in fields else {}
    for name in sorted(models.keys() & programs.keys()):
        raise programs[name].complaint(f"{name!r} is a model too", "Give each its own name.", line=programs[name].key_line)
    deployments = (
        *(_deployment(name, node, base_directory) for name, node in models.items()),
        *(_program(name, node, base_directory) for name, node in programs.items()),
    )
    clash = find_clash(deployments)
    if clash is not None:
        node = models.get(clash.name) or programs[clash.name]
        raise node.complaint(clash.text, clash.hint, line=node.key_line)
    unreachable = find_unreachable(deployments)
    if unreachable is not None:
        node = programs[unreachable[0]]
        raise node.complaint(unreachable[1], "`after` names models and programs of this file.", line=node.key_line)
    return Stack(
        gpus=_gpu_choice(fields.get("gpus"), check_product),
        deployments=deployments,
        queue=read_queue(fields.get("queue")),
    )


def _gpu_choice(node: YamlNode | None, check_product: Callable[[str], object]) -> GpuChoice:
    if node is None:
        return GpuChoice()
    if not node.is_mapping:
        node.choice(("auto",))
        return GpuChoice()
    fields = node.fields(("simulated", "software", "count"))
    kinds = [kind for kind in ("simulated", "software") if kind in fields]
    if len(kinds) != 1:
        wrong = "'gpus' says both 'simulated' and 'software'" if kinds else "'gpus' does not say what to simulate"
        raise node.complaint(wrong, "For example: gpus: {simulated: MI300X, count: 2}")
    (kind,) = kinds
    count = fields["count"].whole_number(most=64, example="2") if "count" in fields else 1
    product = fields[kind].text("MI300X")
    try:
        check_product(product)
    except UnknownProduct as error:
        raise fields[kind].complaint(f"'{kind}': {error.message}", error.hint) from error
    return GpuChoice(simulated=product, count=count, software=kind == "software")


def _check_name(name: str, node: YamlNode, of: str) -> None:
    if not _NAME.fullmatch(name):
        raise node.complaint(
            f"{name[:70]!r} cannot be a {of}'s name",
            f"{_name_like(name)}Use up to 63 letters, digits, '.', '_' and '-'; begin with a letter or digit.",
            line=node.key_line,
        )


def _name_like(name: str) -> str:
    near = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:63]
    return f"Did you mean {near!r}? " if _NAME.fullmatch(near) else ""


def _program(name: str, node: YamlNode, base_directory: Path | None) -> Deployment:
    _check_name(name, node, "program")
    fields = node.fields(_PROGRAM_KEYS, "a mapping such as {command: [python, train.py], gpu: {memory: 8GiB}}", _BELONGS)
    ask = _ask(name, fields)
    program = read_program(node, fields, ask.want, base_directory)
    return Deployment(
        name=name,
        model=name,
        ask=ask,
        engine=PROGRAM,
        replicas=_Numbers(fields).read("replicas", most=1000, example="2") or 1,
        keep_seconds=read_keep_seconds(fields),
        launcher=fields["launcher"].choice(LAUNCHERS) if "launcher" in fields else LAUNCHERS[0],
        watchdog=WatchdogPolicy(fields["watchdog"].choice(WatchdogPolicy)) if "watchdog" in fields else WatchdogPolicy.WARN,
        sharing=_sharing(fields.get("sharing"), None),
        overrides=replace(read_overrides(fields, base_directory), program=program),
    )


def _deployment(name: str, node: YamlNode, base_directory: Path | None) -> Deployment:
    _check_name(name, node, "model")
    fields = node.fields(_MODEL_KEYS, "a mapping such as {model: MODEL}", _BELONGS)
    ask = _ask(name, fields)
    server = read_server(fields, ask.want, base_directory)
    if "model" not in fields and server is None:
        raise node.complaint(f"{name!r} does not say which model", "For example: model: HuggingFaceTB/SmolLM2-135M-Instruct")
    number = _Numbers(fields)
    objective = read_objective(fields.get("slo"))
    overrides = read_overrides(fields, base_directory)
    return Deployment(
        name=name,
        model=_resolve_model(fields["model"].text("HuggingFaceTB/SmolLM2-135M-Instruct"), base_directory)
        if "model" in fields
        else name,
        ask=ask,
        engine=COMMAND if server else fields["engine"].choice(ENGINES) if "engine" in fields else None,
        precision=_word(fields["precision"], "fp16").lower() if "precision" in fields else None,
        context_tokens=number.read("context", most=100_000_000, example="8192"),
        concurrency=number.read("concurrency", most=10_000, example="8"),
        objective=objective,
        replicas=number.read("replicas", most=1000, example="2") or 1,
        keep_seconds=_keep_seconds(fields.get("keep")),
        sleeps_in_place="sleep" not in fields or fields["sleep"].choice(SLEEPS) == SLEEPS[0],
        prepared="prepared" not in fields or fields["prepared"].choice(PREPARED) == PREPARED[0],
        launcher=fields["launcher"].choice(LAUNCHERS) if "launcher" in fields else LAUNCHERS[0],
        watchdog=WatchdogPolicy(fields["watchdog"].choice(WatchdogPolicy)) if "watchdog" in fields else WatchdogPolicy.WARN,
        sharing=_sharing(fields.get("sharing"), objective),
        overrides=replace(
            overrides,
            arguments=() if server else overrides.arguments,  # a preset has them in its command
            adapters=read_adapters(fields.get(ADAPTERS), name, base_directory),
            server=server,
        ),
        aliases=read_aliases(fields.get("aliases"), name),
        default="default" in fields and fields["default"].choice(("true", "false")) == "true",
    )


def _sharing(node: YamlNode | None, objective: ServiceObjective | None) -> Sharing:
    if node is None:
        return Sharing.STRICT
    sharing = Sharing(node.choice(Sharing))
    if sharing is Sharing.PROMISE and (objective is None or not objective.has_times):
        raise node.complaint(
            "'sharing: promise' needs a promise to keep", "For example: slo: {tpot_p95: 50ms}; or use strict or fair."
        )
    return sharing


@dataclass(frozen=True, slots=True)
class _Numbers:
    fields: dict[str, YamlNode]

    def read(self, key: str, *, most: int, example: str) -> int | None:
        return self.fields[key].whole_number(most=most, example=example) if key in self.fields else None


def _ask(name: str, fields: dict[str, YamlNode]) -> Ask:
    want, compute_ppm, devices = _want(fields.get("gpu"))
    if "compute" in fields:
        if compute_ppm is not None:
            raise fields["compute"].complaint("'compute' is also under 'gpu'", "Keep one of them.")
        compute_ppm = fields["compute"].quantity(parse_ppm, "30%")
    return Ask(
        name=name,
        deployment=name,
        want=want,
        devices=devices,
        compute_ppm=compute_ppm,
        isolation=IsolationRequirement(fields["isolation"].choice(IsolationRequirement))
        if "isolation" in fields
        else IsolationRequirement.NONE,
        priority=Priority(fields["priority"].choice(Priority)) if "priority" in fields else Priority.MEDIUM,
        **read_place(fields.get("place")),
        **read_host(fields.get("host")),
    )


def _want(node: YamlNode | None) -> tuple[Want, int | None, int]:
    """What of a GPU, how much of its compute where that was said here, and of how many."""
    if node is None:
        return Auto(), None, 1
    if not node.is_mapping:
        if (text := node.text("auto")) != "auto":
            raise node.complaint(f"'gpu' cannot be {text[:40]!r}", f"Write `gpu: {_share_like(text)}`, or `gpu: auto`.")
        return Auto(), None, 1
    fields = node.fields((*_WANT_KEYS, "compute", "devices"))
    chosen = [key for key in fields if key in _WANT_KEYS]
    if len(chosen) > 1:
        raise fields[chosen[1]].complaint(
            f"'gpu' says both {chosen[0]!r} and {chosen[1]!r}", f"Keep one of: {', '.join(_WANT_KEYS)}."
        )
    compute_ppm = fields["compute"].quantity(parse_ppm, "30%") if "compute" in fields else None
    if not chosen and compute_ppm is None and "devices" not in fields:
        raise node.complaint("'gpu' is empty", "For example: gpu: {memory: 24GiB}, or gpu: auto")
    if "devices" in fields and chosen == ["whole"]:
        raise fields["devices"].complaint("'gpu' says both 'whole' and 'devices'", "whole: 2 is two whole GPUs already.")
    devices = fields["devices"].whole_number(most=64, example="2") if "devices" in fields else 1
    return (_chosen_want(chosen[0], fields[chosen[0]]) if chosen else Auto()), compute_ppm, devices


def _share_like(text: str) -> str:
    """What `2GiB`, `50%`, `2` or `cpx` alone may mean."""
    if _MODE.fullmatch(text):
        return f"{{partition: {text.lower()}}}"
    if text.isdigit():
        return f"{{whole: {text}}}"
    for key, parse in (("memory", parse_bytes), ("fraction", parse_ppm)):
        try:
            parse(text)
        except InvalidQuantity:
            continue
        return f"{{{key}: {text}}}"
    return "{memory: 24GiB}"


def _chosen_want(key: str, node: YamlNode) -> Want:
    if key == "memory":
        return Memory(memory_bytes=node.quantity(parse_bytes, "24GiB"))
    if key == "fraction":
        return Fraction(ppm=node.quantity(parse_ppm, "0.5"))
    if key == "partition":
        return PartitionKind(kind=_word(node, "cpx").lower())
    return Whole(count=node.whole_number(most=64, example="1"))


def _keep_seconds(node: YamlNode | None) -> int | None:
    if node is None or node.text("10m") == "always":
        return None
    if node.text("10m") in _ALWAYS:
        raise node.complaint(f"'keep' cannot be {node.text('10m')!r}", "Did you mean 'always'?")
    milliseconds = node.quantity(parse_duration_ms, "10m")
    if milliseconds % 1000:
        raise node.complaint("'keep' must be whole seconds", "For example: keep: 10m, or keep: always")
    return milliseconds // 1000


def _word(node: YamlNode, example: str) -> str:
    text = node.text(example)
    if not _WORD.fullmatch(text):
        raise node.complaint(f"{node.key!r} cannot be {text[:40]!r}", f"For example: {node.key}: {example}")
    return text


def _resolve_model(model: str, base_directory: Path | None) -> str:
    """A path that counts from the stack file becomes absolute; an id or a tag stays as it is."""
    if model.startswith("~/"):
        return str(Path(model).expanduser())
    looks_like_path = model.startswith(("./", "../")) or model in (".", "..") or model.lower().endswith(".gguf")
    if base_directory is None or not looks_like_path:
        return model
    return str((base_directory / model).resolve())
