import os
import socket
from typing import Any

import pytest

from aimgpu.errors import AimGpuError, NotAllowed, NotAuthenticated
from aimgpu.web.authority import Authority, find_socket_owner, is_local

TOKEN = "secret-token"
PAGE = (b"x-aimgpu-page", b"1")
HOST = (b"host", b"127.0.0.1:8080")


def scope(*headers: tuple[bytes, bytes], client: str = "127.0.0.1") -> dict[str, Any]:
    return {"headers": [HOST, *headers], "client": (client, 50000), "server": ("127.0.0.1", 8080)}


def authority(*, keys: bool = False, owner: int | None = None) -> Authority:
    mine = os.geteuid() if owner is None else owner
    return Authority(TOKEN, lambda: keys, lambda _client, _server: mine)


def test_a_browser_of_the_daemons_own_user_may_write_from_the_page() -> None:
    authority().check_write(scope(PAGE, (b"origin", b"http://127.0.0.1:8080"), (b"sec-fetch-site", b"same-origin")))
    assert authority().access(scope()).write


@pytest.mark.parametrize(
    "headers",
    [
        (),  # no header of the page: a form or a link of another site
        ((b"origin", b"http://evil.example"), PAGE),
        ((b"origin", b"null"), PAGE),
        ((b"sec-fetch-site", b"cross-site"), PAGE),
        ((b"sec-fetch-site", b"same-site"), PAGE),
    ],
)
def test_a_request_that_another_site_could_have_caused_is_refused(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    with pytest.raises(NotAllowed):
        authority().check_write(scope(*headers))


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (authority(keys=True), {}),
        (authority(owner=54321), {}),
        (authority(), {"client": "10.0.0.7"}),
    ],
)
def test_others_need_the_token_to_write(given: Authority, changes: dict[str, str]) -> None:
    with pytest.raises(NotAuthenticated):
        given.check_write(scope(PAGE, **changes))
    assert not given.access(scope(PAGE, **changes)).write
    given.check_write(scope((b"authorization", b"Bearer " + TOKEN.encode()), **changes))


def test_a_wrong_token_opens_nothing() -> None:
    with pytest.raises(AimGpuError):
        authority(keys=True).check_write(scope((b"authorization", b"Bearer secret-tokem"), PAGE))


def test_reading_is_for_this_machine_or_with_the_token() -> None:
    authority(keys=True).check_read(scope())
    for foreign in (scope(client="10.0.0.7"), scope((b"x-forwarded-for", b"10.0.0.7"))):
        with pytest.raises(NotAuthenticated):
            authority().check_read(foreign)


def test_what_a_proxy_passed_on_is_not_local() -> None:
    assert is_local(scope())
    assert not is_local(scope((b"forwarded", b"for=10.0.0.7")))
    assert not is_local({"headers": [], "client": None})


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_owner_of_a_connection_on_this_machine_is_found(family: socket.AddressFamily, address: str) -> None:
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"cannot listen on {address}: {error}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as caller:
        assert find_socket_owner(caller.getsockname()[:2], listener.getsockname()[:2]) == os.geteuid()
    assert find_socket_owner((address, 1), (address, 2)) is None
