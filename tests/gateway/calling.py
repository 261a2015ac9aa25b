"""A plain HTTP caller for the tests."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.http_answer import HttpAnswer

CHAT: dict[str, object] = {"model": "chat", "messages": [{"role": "user", "content": "a secret prompt"}]}


@dataclass(frozen=True, slots=True)
class Got(HttpAnswer):
    @property
    def error(self) -> Any:
        return self.json["error"]


def call(port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Got:
    """`body`: bytes go as they are, anything else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return Got(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def chat(port: int, headers: dict[str, str] | None = None, **fields: object) -> Got:
    return call(port, "POST", "/v1/chat/completions", CHAT | fields, headers)


def open_chat(port: int, **fields: object) -> socket.socket:
    """Sends a request and leaves the connection open, for callers that misbehave."""
    body = json.dumps(CHAT | fields).encode()
    caller = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    caller.sendall(head.encode() + body)
    return caller


def raw_exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as caller:
        caller.sendall(data)
        caller.shutdown(socket.SHUT_WR)
        received = b""
        while part := caller.recv(65536):
            received += part
        return received


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
