"""The part of a stack file that says where a model may run: which GPUs, beside whom, and what of the host it takes."""

import re
from decimal import Decimal
from typing import TypedDict

from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Spread, Vendor
from aimgpu.errors import InvalidQuantity
from aimgpu.units import parse_bytes

PLACE_KEYS = (
    "products",
    "not_products",
    "vendor",
    "not_vendor",
    "spread",
    "with",
    "not_with",
    "partition",
    "pinned",
)
HOST_KEYS = ("cpu", "memory")
_WORDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:/-]{0,127}", re.ASCII)
_CPU = re.compile(r"\d{1,6}(\.\d{1,3})?|\d{1,9}m", re.ASCII)


class Place(TypedDict, total=False):
    """Fields of an ask."""

    products: frozenset[str]
    refused_products: frozenset[str]
    vendor: str
    refused_vendor: str
    spread: Spread
    with_deployments: frozenset[str]
    not_with_deployments: frozenset[str]
    partition_id: str
    pinned: bool


class Host(TypedDict, total=False):
    """Fields of an ask."""

    cpu_millis: int
    host_memory_bytes: int


def read_place(node: YamlNode | None) -> Place:
    """The fields of an ask under `place`."""
    if node is None:
        return Place()
    fields = node.fields(PLACE_KEYS)
    if not fields:
        raise node.complaint("'place' is empty", "For example: place: {products: [MI300X]}")
    place = Place()
    if "products" in fields:
        place["products"] = _names(fields["products"], "[MI300X]")
    if "not_products" in fields:
        place["refused_products"] = _names(fields["not_products"], "[MI210]")
    if "vendor" in fields:
        place["vendor"] = fields["vendor"].choice(Vendor)
    if "not_vendor" in fields:
        place["refused_vendor"] = fields["not_vendor"].choice(Vendor)
    if "spread" in fields:
        place["spread"] = Spread.SPREAD if _flag(fields["spread"]) else Spread.PACK
    if "with" in fields:
        place["with_deployments"] = _names(fields["with"], "[embed]")
    if "not_with" in fields:
        place["not_with_deployments"] = _names(fields["not_with"], "[batch]")
    if "partition" in fields:
        place["partition_id"] = _name(fields["partition"], "GPU/cpx-0")
    if "pinned" in fields:
        place["pinned"] = _flag(fields["pinned"])
    return place


def read_host(node: YamlNode | None) -> Host:
    """The fields of an ask under `host`."""
    if node is None:
        return Host()
    fields = node.fields(HOST_KEYS)
    if not fields:
        raise node.complaint("'host' is empty", "For example: host: {cpu: 4, memory: 16GiB}")
    host = Host()
    if "cpu" in fields:
        host["cpu_millis"] = fields["cpu"].quantity(_parse_cpu, "4")
    if "memory" in fields:
        host["host_memory_bytes"] = fields["memory"].quantity(parse_bytes, "16GiB")
    return host


def _parse_cpu(text: str) -> int:
    """Thousandths of a core of "4", "0.5" or "500m"."""
    if not _CPU.fullmatch(text):
        raise InvalidQuantity(f"{text[:40]!r} is not a number of cores", hint="For example 4, 0.5 or 500m.")
    return int(text[:-1]) if text.endswith("m") else int(Decimal(text) * 1000)


def _names(node: YamlNode, example: str) -> frozenset[str]:
    """One name, or a list of them."""
    return frozenset(_name(item, example) for item in node.items())


def _name(node: YamlNode, example: str) -> str:
    text = node.text(example)
    if not _WORDS.fullmatch(text):
        raise node.complaint(f"{node.key!r} cannot be {text[:40]!r}", f"For example: {node.key}: {example}")
    return text


def _flag(node: YamlNode) -> bool:
    return node.choice(("true", "false")) == "true"
