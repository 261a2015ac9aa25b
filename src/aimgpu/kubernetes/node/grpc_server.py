"""gRPC over unix sockets, without generated stubs: a service is a table of methods."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

log = logging.getLogger(__name__)

# Answers one message, or streams several.
Unary = Callable[[Any, Any], Awaitable[Message]]
Stream = Callable[[Any, Any], AsyncIterator[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    request: type[Message]
    unary: Unary | None = None
    stream: Stream | None = None


class SocketServer:
    """One gRPC server on one socket file."""

    def __init__(self, path: Path, services: Mapping[str, Mapping[str, Method]]) -> None:
        self.path = path
        self._services = services
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Take the place of whatever socket file is left there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        server = grpc.aio.server()
        for service, methods in self._services.items():
            handlers = {name: _handler(method) for name, method in methods.items()}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix://{self.path}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is None:
            return
        task = asyncio.current_task()
        cancelling = task.cancelling() if task is not None else 0
        await self._server.stop(grace=0.5)
        self._server = None
        self.path.unlink(missing_ok=True)
        if task is not None and task.cancelling() > cancelling:  # gRPC uses `wait_for`, which loses it until Python 3.12
            raise asyncio.CancelledError


def _handler(method: Method) -> "grpc.RpcMethodHandler[Any, Any]":
    parse, print_ = method.request.FromString, _serialize
    if method.stream is not None:
        return grpc.unary_stream_rpc_method_handler(method.stream, request_deserializer=parse, response_serializer=print_)
    if method.unary is None:
        raise ValueError("a method answers once or streams")
    return grpc.unary_unary_rpc_method_handler(method.unary, request_deserializer=parse, response_serializer=print_)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
