"""The page of the chart's values: path, type and default from values.yaml and its schema, meaning from the comments."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from tools.generate_chart import CHART, LABEL

_SHARED = ("pod", "container", "serviceAccount", "resources")  # of every component, described at the first that has them
_HEAD = """# Chart values

What `helm install` takes by `--set PATH=VALUE` or `--values FILE`, with the defaults of
[values.yaml](../../deploy/helm/aim-gpu-sharing/values.yaml). Unknown values and wrong types are refused.
In patterns, `NAME` is a DNS label: at most 63 lower-case letters, digits and inner dashes.
How to use them: [install on Kubernetes](../how-to/install-on-kubernetes.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    path: str
    line: int
    meaning: str  # the comment above the key, and the one beside it
    schema: Mapping[str, Any] | None  # None: the schema does not know it
    default: Any
    group: bool  # the values below it follow


def read_values(text: str, schema: Mapping[str, Any]) -> list[Value]:
    """In the order of the text. A map in braces is one value."""
    root, shared = yaml.compose(text), dict[str, str]()

    def below(node: yaml.MappingNode, where: str, known: Mapping[str, Any]) -> Iterator[Value]:
        for key, item in node.value:
            found = known.get("properties", {}).get(key.value)
            group = isinstance(item, yaml.MappingNode) and not item.flow_style and key.value not in _SHARED
            meaning = _comment(text.splitlines(), key, item)
            if key.value in _SHARED:
                meaning = shared.setdefault(key.value, meaning)
            yield Value(
                path=f"{where}{key.value}",
                line=key.start_mark.line + 1,
                meaning=meaning,
                schema=found,
                default=yaml.safe_load(yaml.serialize(item)),
                group=group,
            )
            if group:
                yield from below(item, f"{where}{key.value}.", found or {})

    return list(below(root, "", schema))


def faults() -> list[str]:
    """Why the page would be incomplete."""
    found = []
    for value in _chart_values():
        where = f"{CHART.name}/values.yaml:{value.line}: {value.path}"
        if value.schema is None:
            found.append(f"{where} is not in values.schema.json; run `make docs`")
        elif not value.group and not value.meaning:
            found.append(f"{where} has no comment that says what it is")
    return found


def page() -> str:
    rows: dict[str, list[str]] = {"": []}
    intro: dict[str, str] = {}
    for value in _chart_values():
        section, _, inner = value.path.partition(".")
        if value.group and not inner:
            rows[section], intro[section] = [], value.meaning
        elif value.meaning:
            kind, default = ("", "") if value.group else (_type(value.schema or {}), f"`{json.dumps(value.default)}`")
            cells = (f"`{value.path}`", kind, default, value.meaning)
            rows[section if inner else ""].append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines = [_HEAD]
    for section, shown in rows.items():
        lines += [f"## {section}", ""] if section else []
        lines += [intro[section], ""] if intro.get(section) else []
        lines += ["| value | type | default | meaning |", "| --- | --- | --- | --- |", *shown, ""]
    return "\n".join(lines)


def _chart_values() -> list[Value]:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return read_values((CHART / "values.yaml").read_text(encoding="utf-8"), schema)


def _comment(lines: list[str], key: yaml.Node, item: yaml.Node) -> str:
    """What stands directly above the key at its depth, and beside the value."""
    first, found = key.start_mark.line, list[str]()
    while first and re.match(rf" {{{key.start_mark.column}}}#", lines[first - 1]):
        first -= 1
        found.insert(0, lines[first].strip("# "))
    block = isinstance(item, yaml.CollectionNode) and not item.flow_style
    end = key.end_mark if block else item.end_mark
    beside = re.match(r":?\s+# *(.*)", lines[end.line][end.column :])
    return " ".join([*found, beside[1]] if beside else found)


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "")
    if kind == "array":
        return "list of " + re.sub(r"^\w+", r"\g<0>s", _type(schema["items"])) if "items" in schema else "list"
    if kind == "object":
        inner = schema.get("additionalProperties")
        names = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
        return f"map of {names}" if inner is False else "map of strings" if isinstance(inner, dict) else "map"
    if "maximum" in schema:
        return f"{schema['minimum']} to {schema['maximum']}"
    least = f", at least {schema['minimum']}" if "minimum" in schema else ""
    return f"{kind} like `{schema['pattern'].replace(LABEL, 'NAME')}`" if "pattern" in schema else f"{kind}{least}"
