"""Whose rights a change is made with.

`aimgpu web --on kubernetes` runs on the user's machine with the user's kubeconfig: a browser that opened the link that it
prints has those rights. The page of the chart runs in a pod, and everyone who may forward a port to it may look. A change
needs a Kubernetes token of the person who makes it, and is made with that person's rights.
The pod's own account can change nothing.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aimgpu.errors import NotAuthenticated
from aimgpu.keyfile import bearer_token
from aimgpu.kubernetes.api.client import Client
from aimgpu.web.authority import Authority, PageAccess, Scope, is_local

TOKEN_NEEDED = "Changes and logs need your own Kubernetes token, and have its rights."  # noqa: S105 - for people
_HOW = "`kubectl create token ACCOUNT` prints one. Enter it on the page under Keys."
_REACH = "Use `kubectl port-forward deploy/aim-gpu-sharing-web 8081`, or run `aimgpu web --on kubernetes`."


class _NoKeys:
    required = False

    def find(self, _token: bytes) -> None:
        return None


class ClusterAuthority(Authority):
    """`own_rights`: a browser that opened the printed link may do everything, others nothing. Else this machine may look."""

    def __init__(self, *, own_rights: bool) -> None:
        super().__init__(secrets.token_hex(32), _NoKeys())
        self.own_rights = own_rights

    def check_read(self, scope: Scope) -> None:
        """Raises NotAuthenticated."""
        if not is_local(scope):
            raise NotAuthenticated("The page of a cluster answers on its own machine only.", hint=_REACH)
        if self.own_rights and not self.may_change(scope):
            raise NotAuthenticated("This page needs the link that `aimgpu web --on kubernetes` printed.", hint=_REACH)

    def check_write(self, scope: Scope) -> None:
        """With this process' own rights. Raises NotAuthenticated or NotAllowed."""
        if not self.own_rights:
            raise NotAuthenticated(TOKEN_NEEDED, hint=_HOW)
        super().check_write(scope)

    def access(self, scope: Scope) -> PageAccess:
        """A token is taken for good here; the API server judges it."""
        if self.own_rights:
            return super().access(scope)
        given = is_local(scope) and read_token(scope) is not None
        return PageAccess(read=is_local(scope), write=given, reason=None if given else TOKEN_NEEDED)


class Callers:
    """Gives each request the client whose rights it has."""

    def __init__(self, own: Client, authority: ClusterAuthority) -> None:
        self.own = own
        self.authority = authority

    @asynccontextmanager
    async def client_of(self, scope: Scope) -> AsyncIterator[Client]:
        """Raises NotAuthenticated or NotAllowed."""
        self.authority.check_read(scope)
        token = None if self.authority.own_rights else read_token(scope)
        if token is None:
            self.authority.check_write(scope)
            yield self.own
            return
        async with self.own.with_token(token) as client:
            yield client


def read_token(scope: Scope) -> str | None:
    """The bearer token of a request."""
    found = next((bearer_token(bytes(value)) for key, value in scope["headers"] if key == b"authorization"), None)
    return found.decode("latin-1") if found else None
