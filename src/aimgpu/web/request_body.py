"""JSON that a caller of the page or of the control API sent."""

import json
from typing import Any

from starlette.requests import Request

from aimgpu.errors import InvalidInput


async def read_json(request: Request, *, most_bytes: int) -> dict[str, Any]:
    """An object; none sent is an empty one. Raises InvalidInput, and reads no more than it takes."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise InvalidInput(f"a body of more than {most_bytes} bytes")
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object")
    return value
