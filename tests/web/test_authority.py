import os
import socket
from typing import Any

import pytest

from aimgpu.errors import AimGpuError, NotAllowed, NotAuthenticated
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.keyfile import hash_key
from aimgpu.web.authority import LINK_SECONDS, Authority, PageLinks, find_socket_owner, is_local

TOKEN = "secret-token"
PAGE = (b"x-aimgpu-page", b"1")
HOST = (b"host", b"127.0.0.1:8080")
ME, NEIGHBOUR = 1000, 1001


class Owners:
    """Whose each connection is."""

    user: int | None = ME

    def __call__(self, _client: object, _server: object) -> int | None:
        return self.user


def scope(*headers: tuple[bytes, bytes], client: str = "127.0.0.1", port: int = 8080) -> dict[str, Any]:
    return {"headers": [HOST, *headers], "client": (client, 50000), "server": ("127.0.0.1", port)}


def authority(*, keys: bool = False, owners: Owners | None = None) -> Authority:
    callers = {hash_key("full"): Caller(name="full"), hash_key("low"): Caller(name="low", concurrency=1)} if keys else {}
    return Authority(TOKEN, KeyTable(callers, required=keys), owners or Owners())


def bearer(text: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {text}".encode()


def opened(given: Authority, client: str = "127.0.0.1") -> tuple[bytes, bytes]:
    """The cookie of a browser that opened a link."""
    cookie = given.open_link(scope(client=client), given.make_link().removeprefix("/link/"))
    assert cookie is not None
    assert "SameSite=Strict" in cookie
    assert "HttpOnly" in cookie
    return b"cookie", b"other=1; " + cookie.partition(";")[0].encode()


def test_a_connection_on_this_machine_may_change_nothing_by_itself() -> None:
    for given in (authority(), authority(keys=True)):
        with pytest.raises(NotAuthenticated, match="aimgpu web"):
            given.check_write(scope(PAGE, (b"origin", b"http://127.0.0.1:8080"), (b"sec-fetch-site", b"same-origin")))
        assert not given.access(scope(PAGE)).write


@pytest.mark.parametrize("keys", [False, True])
def test_a_browser_that_opened_the_link_may_write_from_the_page(keys: bool) -> None:  # noqa: FBT001
    given = authority(keys=keys)
    cookie = opened(given)
    given.check_write(scope(PAGE, cookie, (b"origin", b"http://127.0.0.1:8080"), (b"sec-fetch-site", b"same-origin")))
    given.check_read(scope(cookie))
    assert given.access(scope(cookie)).write


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
    given = authority()
    with pytest.raises(NotAllowed):
        given.check_write(scope(opened(given), *headers))
    with pytest.raises(NotAllowed):
        given.check_judge(scope(*headers))


def test_a_link_works_once_and_for_the_user_who_opened_it() -> None:
    owners = Owners()
    given = authority(owners=owners)
    code = given.make_link().removeprefix("/link/")
    cookie = given.open_link(scope(), code)
    assert cookie is not None
    header = (b"cookie", cookie.partition(";")[0].encode())
    with pytest.raises(NotAllowed, match="used already"):
        given.open_link(scope(), code)
    assert given.open_link(scope(header), code) is None, "a page that is open is opened again by its old link"
    owners.user = NEIGHBOUR
    with pytest.raises(NotAuthenticated):
        given.check_write(scope(header, PAGE))


def test_a_cookie_of_a_browser_elsewhere_counts_for_its_address() -> None:
    given = authority()
    cookie = opened(given, "10.0.0.7")
    given.check_write(scope(cookie, PAGE, client="10.0.0.7"))
    with pytest.raises(NotAuthenticated):
        given.check_write(scope(cookie, PAGE, client="10.0.0.8"))
    with pytest.raises(NotAuthenticated):
        given.check_write(scope(cookie, PAGE))


def test_links_expire_and_the_oldest_go_where_there_are_many() -> None:
    now = 0.0
    links = PageLinks(lambda: now)
    late = links.make()
    now = LINK_SECONDS + 1
    assert links.open(late, ("user", ME)) is None
    first = links.make()
    for _ in range(64):
        links.make()
    assert links.open(first, ("user", ME)) is None


@pytest.mark.parametrize("cookie", [b"", b"aimgpu-8080", b"aimgpu-8080=", b"aimgpu-8080=x", b"\xff\xfe=;;;", b"a" * 5000])
def test_a_cookie_that_is_none_of_ours_opens_nothing(cookie: bytes) -> None:
    assert not authority().is_open_page(scope((b"cookie", cookie)))


@pytest.mark.parametrize(("keys", "client"), [(True, "127.0.0.1"), (False, "127.0.0.1"), (False, "10.0.0.7")])
def test_the_token_may_do_everything_from_everywhere(keys: bool, client: str) -> None:  # noqa: FBT001
    given, asked = authority(keys=keys), scope(bearer(TOKEN), client=client)
    given.check_read(asked)
    given.check_judge(asked)
    given.check_write(asked)


def test_a_wrong_token_opens_nothing() -> None:
    with pytest.raises(AimGpuError):
        authority(keys=True).check_write(scope(bearer("secret-tokem"), PAGE))


def test_without_keys_this_machine_may_look() -> None:
    authority().check_read(scope())
    for foreign in (scope(client="10.0.0.7"), scope((b"x-forwarded-for", b"10.0.0.7"))):
        with pytest.raises(NotAuthenticated):
            authority().check_read(foreign)


def test_once_a_key_exists_looking_needs_a_key_without_limits_or_the_token() -> None:
    given = authority(keys=True)
    with pytest.raises(NotAuthenticated):
        given.check_read(scope())
    with pytest.raises(NotAllowed, match="limited"):
        given.check_read(scope(bearer("low")))
    given.check_read(scope(bearer("full")))
    given.check_read(scope(bearer("full"), client="10.0.0.7"))
    with pytest.raises(NotAllowed):
        given.check_write(scope(bearer("full"), PAGE))


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
