"""What a stack file says under `adapters`: LoRA adapters of a model, each a model of its own to callers."""

from pathlib import Path

from aimgpu.control.stack.names import read_name
from aimgpu.control.stack.slo import read_objective
from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Adapter, Priority

ADAPTERS = "adapters"
_KEYS = ("path", "name", "priority", "slo")
_EXAMPLE = "{sql: ./adapters/sql}"
_MOST = 64


def read_adapters(node: YamlNode | None, model: str, base_directory: Path | None) -> tuple[Adapter, ...]:
    """Paths count from the stack file's folder; each is called MODEL:KEY unless it has a name."""
    entries = node.entries(f"a mapping such as {_EXAMPLE}") if node is not None else {}
    if node is not None and not 0 < len(entries) <= _MOST:
        raise node.complaint(f"'adapters' has {len(entries)} entries", f"A model has from 1 to {_MOST}. Example: {_EXAMPLE}")
    return tuple(_read_one(key, value, model, base_directory or Path.cwd()) for key, value in entries.items())


def _read_one(key: str, node: YamlNode, model: str, base_directory: Path) -> Adapter:
    fields = node.fields(_KEYS) if node.is_mapping else {"path": node}
    if "path" not in fields:
        raise node.complaint(f"{key!r} does not say where the adapter is", "For example: path: ./adapters/sql")
    path = fields["path"].text("./adapters/sql")
    if "," in path:
        raise fields["path"].complaint(
            f"{path[:60]!r} has a comma, which engines take for the next adapter", "Rename the folder."
        )
    name = read_name(fields["name"], fields["name"].text("sql-bot")) if "name" in fields else f"{model}:{key}"
    return Adapter(
        key=key,
        name=name if "name" in fields else read_name(node, name),
        path=str((base_directory / Path(path).expanduser()).absolute()),
        priority=Priority(fields["priority"].choice(Priority)) if "priority" in fields else None,
        objective=read_objective(fields.get("slo")),
    )
