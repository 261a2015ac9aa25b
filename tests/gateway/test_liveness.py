"""Probes are answered while the event loop is busy, and say when it has not turned for long."""

import asyncio
import http.client
import threading

import pytest

from aimgpu.gateway.liveness import LoopWatch, ProbeServer


def probe(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(("silent", "alive", "ready"), [(0.0, 200, 200), (2.5, 200, 503), (29.0, 200, 503), (31.0, 503, 503)])
def test_a_busy_loop_is_alive_and_not_ready_and_a_wedged_one_is_neither(silent: float, alive: int, ready: int) -> None:
    clock = [100.0]
    watch = LoopWatch(lambda: clock[0])
    server = ProbeServer(watch, lambda: True, ("127.0.0.1", 0))
    try:
        clock[0] += silent
        assert (probe(server.port, "/healthz"), probe(server.port, "/readyz")) == (alive, ready)
        watch.turned()
        assert (probe(server.port, "/healthz"), probe(server.port, "/readyz")) == (200, 200)
        assert probe(server.port, "/metrics") == 404
    finally:
        server.close()


def test_readiness_needs_more_than_a_loop_that_turns() -> None:
    server = ProbeServer(LoopWatch(), lambda: False, ("127.0.0.1", 0))
    try:
        assert (probe(server.port, "/healthz"), probe(server.port, "/readyz")) == (200, 503)
    finally:
        server.close()


def test_probes_are_answered_while_the_loop_is_blocked() -> None:
    """The loop waits here for the answers of the probes, and does not turn until it has them."""
    found: list[int] = []

    async def main() -> None:
        watch = LoopWatch()
        turning = asyncio.ensure_future(watch.run())
        server = ProbeServer(watch, lambda: True, ("127.0.0.1", 0))
        asker = threading.Thread(target=lambda: found.append(probe(server.port, "/healthz")))
        asker.start()
        asker.join()
        turning.cancel()
        server.close()

    asyncio.run(main())
    assert found == [200]
