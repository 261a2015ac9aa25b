"""What the gateway answers without a key: whether it lives, whether it can serve, and a page that shows its API."""

import base64
import functools
import hashlib
from importlib import resources

from aimgpu.gateway.http.asgi import NO_STORE, Header, Scope, Send, send_answer, send_json

ALIVE = frozenset({"/health", "/healthz", "/livez"})
READY = "/readyz"
API_PAGE = "/docs"
PUBLIC = (*sorted(ALIVE), READY, API_PAGE)
_POLICY = (
    b"default-src 'none'; script-src 'sha256-%b'; style-src 'unsafe-inline'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def answer_public(scope: Scope, send: Send, *, ready: bool) -> bool:
    """True: the path is one of these, and is answered. `ready`: the route table has been filled."""
    path = scope["path"]
    if path in ALIVE:
        await send_json(send, {"status": "ok"}, (NO_STORE,))
    elif path == READY:
        await send_json(send, {"status": "ready" if ready else "starting"}, (NO_STORE,), status=200 if ready else 503)
    elif path == API_PAGE:
        await _send_page(send)
    else:
        return False
    return True


async def _send_page(send: Send) -> None:
    page, digest = _read_page()
    headers: list[Header] = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", _POLICY % digest),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send_answer(send, 200, headers, page)


@functools.cache
def _read_page() -> tuple[bytes, bytes]:
    """The page, and the digest by which the browser knows its one script."""
    page = resources.files("aimgpu.gateway").joinpath("api_page.html").read_bytes()
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    return page, base64.b64encode(hashlib.sha256(script).digest())
