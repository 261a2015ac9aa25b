"""How `chat` and `run` talk to a gateway: the models that it lists, and answers as they come."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from json import JSONDecodeError, dumps, loads
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from aimgpu.cli.client import error_from_json, start_line
from aimgpu.errors import (
    AimGpuError,
    DaemonUnreachable,
    EngineDisconnected,
    InvalidInput,
    ModelNotFound,
    NotAuthenticated,
    UnknownDeployment,
)

_KEY_HINT = "Put it into AIMGPU_API_KEY: `export AIMGPU_API_KEY=$(aimgpu keys add me)` does so with a new one."
_ENDPOINT_HINT = "Is this an OpenAI endpoint?"
_LOGS_HINT = "`aimgpu logs` may say why."
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ListedModel:
    """As the gateway lists it; other servers say no more than its name."""

    name: str
    state: str = "ready"
    start_seconds: int | None = None


class GatewayClient:
    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._address = _parse_url(self.url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidInput("an API key is one line of ASCII text", hint=_KEY_HINT)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def choose_model(self, named: str | None) -> str:
        """Asks also where one is named: whether it is there is to be known before something is typed."""
        models = self.list_models()
        if named is not None:
            names = [model.name for model in models]
            if named not in names:
                self._check_unlisted(named, names)
            return named
        ready = [model for model in models if model.state == "ready"] or [
            model for model in models if model.state == "sleeping"
        ]
        if not ready:
            waiting = ", ".join(f"{model.name} is {model.state}" for model in models) or "none is deployed"
            hint = "`aimgpu ps` shows them." if models else "`aimgpu run smollm2` starts one."
            raise ModelNotFound(f"no model is ready: {waiting}", hint=hint)
        return ready[0].name

    def list_models(self) -> list[ListedModel]:
        with self._request("GET", "/v1/models") as response:
            return _read_models(response)

    def _check_unlisted(self, named: str, names: list[str]) -> None:
        """A gateway may know a model by other names than it lists."""
        try:
            if named:
                with self._request("GET", f"/v1/models/{quote(named)}"):
                    return
        except ModelNotFound:
            pass
        raise UnknownDeployment.of(named, known=names)

    def stream(self, request: dict[str, Any]) -> Generator[str, None, str]:
        """The answer's text, part by part. Returns why it ended: "stop", or "length" where the limit was reached."""
        ended = "stop"
        with self._request("POST", "/v1/chat/completions", request) as response:
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return ended
                chunk = _read_object(data)
                if "error" in chunk:
                    raise EngineDisconnected(chunk["error"]["message"], hint=_LOGS_HINT)
                for choice in chunk.get("choices", ()):
                    ended = choice.get("finish_reason") or ended
                    text = choice.get("delta", {}).get("content")
                    if text:
                        yield text
        raise EngineDisconnected("the answer broke off", hint=_LOGS_HINT)

    @contextmanager
    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        parts = self._address
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a model may think for long
            connection.request(method, parts.path + path, None if body is None else dumps(body), self._headers)
            response = connection.getresponse()
            if response.status >= 400:  # noqa: PLR2004 -- HTTP's own line
                raise _error_of(response)
            yield response
        except (OSError, HTTPException) as error:
            raise DaemonUnreachable(f"{self.url} does not answer: {error}", hint=start_hint()) from error
        finally:
            connection.close()


def start_hint() -> str:
    return f"Start one with `{start_line()}`, or name another with --url."


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url:
            return parts
    except ValueError:  # brackets or a port that are none
        pass
    raise InvalidInput(f"{url[:100]!r} is not the address of a gateway", hint="For example: --url http://gpubox:8080")


def _read_models(response: HTTPResponse) -> list[ListedModel]:
    models = _read_object(response.read()).get("data")
    if not isinstance(models, list) or not all(isinstance(one, dict) and "id" in one for one in models):
        raise AimGpuError("it did not answer with a list of models", hint=_ENDPOINT_HINT)
    return [
        ListedModel(str(one["id"]), state=str(one.get("state", "ready")), start_seconds=one.get("start_seconds"))
        for one in models
    ]


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        found = loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise AimGpuError("it answered with something that is not a JSON object", hint=_ENDPOINT_HINT)
    return found


def _error_of(response: HTTPResponse) -> AimGpuError:
    try:
        error = error_from_json(loads(response.read())["error"])
        if isinstance(error, NotAuthenticated):
            error.hint = _KEY_HINT
        return error  # noqa: TRY300
    except (JSONDecodeError, KeyError, TypeError):
        return AimGpuError(f"it answered {response.status} {response.reason}", hint=_ENDPOINT_HINT)
