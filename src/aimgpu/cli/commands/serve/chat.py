"""`aimgpu chat`: talk to a model in the terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from json import JSONDecodeError, dumps, loads
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import click

from aimgpu.cli.client import error_from_json
from aimgpu.cli.output import examples, json_option
from aimgpu.cli.running_models import complete_running
from aimgpu.errors import (
    AimGpuError,
    DaemonUnreachable,
    EngineDisconnected,
    InvalidInput,
    ModelNotFound,
    NotAuthenticated,
    UnknownDeployment,
)
from aimgpu.home import find_home

_START_HINT = "Start one with `aimgpu up`, or name another with --url."
_KEY_HINT = "Put it into AIMGPU_API_KEY; `aimgpu keys add NAME` makes one."
_ENDPOINT_HINT = "Is this an OpenAI endpoint?"
_CONNECT_SECONDS = 10.0
_HELP = "Type a message. /clear forgets the conversation so far, /quit (or Ctrl-D) leaves."

Message = dict[str, str]


@click.command(
    epilog=examples(
        "aimgpu chat", "aimgpu chat code", 'echo "Why is the sky blue?" | aimgpu chat', "aimgpu chat --url http://gpubox:8080"
    )
)
@click.argument("model", required=False, shell_complete=complete_running)
@click.option("--url", help="Where the gateway answers. [this machine's daemon]")
@click.option("--key", envvar="AIMGPU_API_KEY", show_envvar=True, help="An API key, where one is needed.")
@click.option("--system", help="The system prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The longest answer.")
@json_option
def chat(  # noqa: PLR0917 -- click passes them by name
    model: str | None, url: str | None, key: str | None, system: str | None, max_tokens: int | None, as_json: bool
) -> None:
    """Talk to MODEL (the first that is ready, when none is named). Answers stream; the talk so far is sent along.

    When the input is no terminal, each line is one message, and the command ends with the last answer.
    """
    gateway = GatewayClient(url or _daemon_url(), key)
    Conversation(gateway, gateway.choose_model(model), system=system, max_tokens=max_tokens, as_json=as_json).hold()


class Conversation:
    """With one model; what was said so far is sent along."""

    def __init__(
        self, gateway: "GatewayClient", model: str, *, system: str | None, max_tokens: int | None, as_json: bool
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._max_tokens = max_tokens
        self._as_json = as_json
        self._beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        self._said = list(self._beginning)

    def hold(self) -> None:
        """Until the input ends."""
        if sys.stdin.isatty() and not self._as_json:
            click.secho(f"{self._model} at {self._gateway.url}. {_HELP}", dim=True, err=True)
        for text in _messages():
            if text == "/clear":
                self._said = list(self._beginning)
            else:
                self.say(text)

    def say(self, text: str) -> None:
        readable = text.encode(errors="surrogateescape").decode(errors="replace")  # what was typed may be no UTF-8
        self._said.append({"role": "user", "content": readable})
        limit = {"max_tokens": self._max_tokens} if self._max_tokens else {}
        request = {"model": self._model, "messages": self._said, "stream": True} | limit
        answer = _say(self._gateway, request, as_json=self._as_json)
        self._said.append({"role": "assistant", "content": answer})


def _messages() -> Iterator[str]:
    """From the prompt until Ctrl-D; from a pipe, a line each."""
    lines = _typed() if sys.stdin.isatty() else sys.stdin
    for line in lines:
        text = line.strip()
        if text == "/quit":
            return
        if text:
            yield text


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return


def _say(gateway: "GatewayClient", request: dict[str, Any], *, as_json: bool) -> str:
    parts: list[str] = []
    for part in gateway.stream(request):
        parts.append(part)
        if not as_json:
            click.echo(part, nl=False)
            sys.stdout.flush()
    answer = "".join(parts)
    click.echo(dumps({"model": request["model"], "role": "assistant", "content": answer}) if as_json else "")
    return answer


def _daemon_url() -> str:
    record = find_home().read_daemon()
    if record is None:
        raise DaemonUnreachable(f"no daemon runs (looked in {find_home().path})", hint=_START_HINT)
    return record.url


class GatewayClient:
    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._address = _parse_url(self.url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidInput("an API key has no line breaks and no letters beyond ASCII", hint=_KEY_HINT)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def choose_model(self, named: str | None) -> str:
        """Asks also where one is named: whether it is there is to be known before something is typed."""
        with self._request("GET", "/v1/models") as response:
            models = _read_models(response)
        if named is not None:
            names = [str(model["id"]) for model in models]
            if named not in names:
                self._check_unlisted(named, names)
            return named
        ready = [model["id"] for model in models if model.get("state", "ready") == "ready"]
        if not ready:
            waiting = ", ".join(f"{model['id']} is {model.get('state')}" for model in models) or "none is deployed"
            raise ModelNotFound(f"no model is ready: {waiting}", hint="`aimgpu ps` shows them.")
        return str(ready[0])

    def _check_unlisted(self, named: str, names: list[str]) -> None:
        """A gateway may know a model by other names than it lists."""
        try:
            if named:
                with self._request("GET", f"/v1/models/{quote(named)}"):
                    return
        except ModelNotFound:
            pass
        raise UnknownDeployment.of(named, known=names)

    def stream(self, request: dict[str, Any]) -> Iterator[str]:
        """The answer's text, part by part."""
        with self._request("POST", "/v1/chat/completions", request) as response:
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                chunk = _read_object(data)
                if "error" in chunk:
                    raise EngineDisconnected(chunk["error"]["message"], hint="`aimgpu logs` may say why.")
                for choice in chunk.get("choices", ()):
                    text = choice.get("delta", {}).get("content")
                    if text:
                        yield text
        raise EngineDisconnected("the answer broke off", hint="`aimgpu logs` may say why.")

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
            raise DaemonUnreachable(f"{self.url} does not answer: {error}", hint=_START_HINT) from error
        finally:
            connection.close()


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url:
            return parts
    except ValueError:  # brackets or a port that are none
        pass
    raise InvalidInput(f"{url[:100]!r} is not the address of a gateway", hint="For example: --url http://gpubox:8080")


def _read_models(response: HTTPResponse) -> list[dict[str, Any]]:
    models = _read_object(response.read()).get("data")
    if not isinstance(models, list) or not all(isinstance(one, dict) and "id" in one for one in models):
        raise AimGpuError("it did not answer with a list of models", hint=_ENDPOINT_HINT)
    return models


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        found = loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise AimGpuError("it answered with something that is no JSON object", hint=_ENDPOINT_HINT)
    return found


def _error_of(response: HTTPResponse) -> AimGpuError:
    try:
        error = error_from_json(loads(response.read())["error"])
        if isinstance(error, NotAuthenticated):
            error.hint = _KEY_HINT
        return error  # noqa: TRY300
    except (JSONDecodeError, KeyError, TypeError):
        return AimGpuError(f"it answered {response.status} {response.reason}", hint=_ENDPOINT_HINT)
