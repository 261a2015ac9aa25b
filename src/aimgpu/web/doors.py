"""What a request needs to pass: each route has one door, and the documented table is made from them."""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aimgpu.web.authority import Scope


class Door(StrEnum):
    """In the order of what it takes."""

    PROBE = "probe"  # that it lives; its API's description without models
    PAGE = "page"  # files that are the same for everybody
    OPEN = "open"  # what this caller may do
    LOOK = "look"  # what runs, without the values of variables
    JUDGE = "judge"  # takes processor time; nothing that the caller names is read
    METRICS = "metrics"
    MODELS = "models"  # the gateway's
    CHANGE = "change"  # changes, logs, prompts: what the daemon's user may


class Doorkeeper(Protocol):
    """Decides about a request; see `Authority`."""

    def check_read(self, scope: Scope) -> None: ...

    def check_judge(self, scope: Scope) -> None: ...

    def check_write(self, scope: Scope) -> None: ...


class GuardedRoute(Route):
    """A route whose handler is not called before its door was passed."""

    def __init__(
        self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str, door: Door, keeper: Doorkeeper
    ) -> None:
        check = {Door.LOOK: keeper.check_read, Door.JUDGE: keeper.check_judge, Door.CHANGE: keeper.check_write}.get(door)
        self.door = door

        async def enter(request: Request) -> Response:
            if check is not None:
                check(request.scope)
            return await handler(request)

        super().__init__(path, enter, methods=[method], name=handler.__name__)
