"""JSON that a caller of the page or of the control API sent."""

from collections.abc import Collection, Mapping
from typing import Any

import orjson
from starlette.requests import Request

from aimgpu.errors import InvalidInput

_LONGEST_SHOWN, _MOST_SHOWN = 40, 5


async def read_json(request: Request, *, most_bytes: int) -> dict[str, Any]:
    """An object; none sent is an empty one. Raises InvalidInput, and reads no more than it takes."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise InvalidInput(f"a body of more than {most_bytes} bytes")
    try:
        value = orjson.loads(body or b"{}")  # refuses half a surrogate pair, which no answer could repeat
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object")
    return value


def refuse_unknown(body: Mapping[str, Any], allowed: Collection[str], where: str = "here") -> None:
    """A key that nothing reads is a mistake in the request. Raises InvalidInput with the keys that there are."""
    unknown = [str(key)[:_LONGEST_SHOWN] for key in body if key not in allowed]
    if unknown:
        named = ", ".join(f"`{key}`" for key in unknown[:_MOST_SHOWN])
        more = f" and {len(unknown) - _MOST_SHOWN} more" if len(unknown) > _MOST_SHOWN else ""
        raise InvalidInput(f"{named}{more} cannot be given {where}", hint=f"Allowed: {', '.join(allowed)}.")
