"""Every operation of every dialect, by method and path."""

from collections.abc import Mapping

from aimgpu.errors import MethodNotAllowed
from aimgpu.gateway.dialects.call import Operation
from aimgpu.gateway.dialects.ollama import OPERATIONS as OLLAMA

OPERATIONS: tuple[Operation, ...] = (*OLLAMA,)


def find_operation(method: str, path: str) -> Operation | None:
    """None: no dialect has this path. Raises MethodNotAllowed."""
    found = _BY_PATH.get(path) or _BY_PATH.get(path[: path.rfind("/") + 1])
    if found is None:
        return None
    operation = found.get("GET" if method == "HEAD" else method)
    if operation is None:
        error = MethodNotAllowed(f"{path[:100]} takes {' or '.join(found)}.")
        error.allowed = ", ".join(found)
        raise error
    return operation


def _index() -> Mapping[str, Mapping[str, Operation]]:
    found: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        found.setdefault(operation.path, {})[operation.method] = operation
    return found


_BY_PATH = _index()
