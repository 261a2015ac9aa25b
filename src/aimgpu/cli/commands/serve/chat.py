"""`aimgpu chat`: talk to a model in the terminal."""

import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from json import dumps

import click

from aimgpu.cli.gateway_client import GatewayClient, ListedModel, start_hint
from aimgpu.cli.output import examples, json_option, print_error
from aimgpu.cli.running_models import complete_running
from aimgpu.cli.views.word_wrap import WordWrap
from aimgpu.errors import AimGpuError, DaemonUnreachable
from aimgpu.home import find_home

UNWATCHED_TOKENS = 512  # of an answer that nobody can stop; the page's own limit
_HELP = """\
/clear        forget the conversation so far
/model NAME   go on with another model
/help         this list
/quit         leave, as Ctrl-D does
Ctrl-C stops an answer; an arrow key brings back what was typed."""

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
@click.option("--max-tokens", type=click.IntRange(min=1), help="The longest answer. [512 where nobody types, else no limit]")
@json_option
def chat(  # noqa: PLR0917 -- click passes them by name
    model: str | None, url: str | None, key: str | None, system: str | None, max_tokens: int | None, as_json: bool
) -> None:
    """Talk to MODEL (the first that is ready, when none is named). Answers stream; the talk so far is sent along.

    When the input is not a terminal, each line is one message, and the command ends with the last answer.
    """
    gateway = GatewayClient(url or _daemon_url(), key)
    Conversation(gateway, gateway.choose_model(model), system=system, max_tokens=max_tokens, as_json=as_json).hold()


class Conversation:
    """With one model at a time; what was said so far is sent along."""

    def __init__(
        self, gateway: GatewayClient, model: str, *, system: str | None, max_tokens: int | None, as_json: bool
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._max_tokens = max_tokens
        self._as_json = as_json
        self._beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        self._said = list(self._beginning)

    def hold(self) -> None:
        """Until the input ends."""
        if not sys.stdin.isatty():
            self._answer_lines()
            return
        click.secho(f"{self._model} at {self._gateway.url}. /help lists what can be typed, Ctrl-D leaves.", dim=True, err=True)
        for text in read_typed():
            if text.startswith("/"):
                if text == "/quit":
                    return
                self._obey(text)
            else:
                self._say_interruptibly(text)

    def _answer_lines(self) -> None:
        for line in sys.stdin:
            text = line.strip()
            if text == "/quit":
                return
            if text == "/clear":
                self._said = list(self._beginning)
            elif text:
                self.say(text)

    def say(self, text: str) -> None:
        """One message and its answer, which is bounded where nobody can stop it."""
        readable = text.encode(errors="surrogateescape").decode(errors="replace")  # what was typed may be no UTF-8
        self._said.append({"role": "user", "content": readable})
        self._tell_of_wait()
        limit = self._max_tokens or (None if sys.stdin.isatty() else UNWATCHED_TOKENS)
        request = {"model": self._model, "messages": self._said, "stream": True} | ({"max_tokens": limit} if limit else {})
        parts: list[str] = []
        try:
            ended = _show(self._gateway.stream(request), parts, WordWrap() if not self._as_json else None)
        finally:
            if parts:
                self._said.append({"role": "assistant", "content": "".join(parts)})
            else:  # two messages in a row are more than some templates take
                self._said.pop()
        if self._as_json:
            click.echo(dumps({"model": self._model, "role": "assistant", "content": "".join(parts)}))
        elif ended == "length":
            more = "--max-tokens sets the limit" if limit else "its context is full; /clear empties it"
            click.secho(f"(The answer was cut: {more}.)", dim=True, err=True)

    def _say_interruptibly(self, text: str) -> None:
        """Ctrl-C ends the answer, an error is shown; the conversation goes on after both."""
        try:
            self.say(text)
        except KeyboardInterrupt:
            click.echo("(stopped)", err=True)
        except AimGpuError as error:
            print_error(error.to_json())

    def _obey(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if command == "/clear":
            self._said = list(self._beginning)
        elif command == "/help":
            click.echo(_HELP)
        elif command == "/model":
            self._change_model(rest.strip())
        else:
            click.echo(f"There is no {command}. A message cannot begin with /; these can be typed:\n{_HELP}")

    def _change_model(self, name: str) -> None:
        try:
            if name:
                self._model = self._gateway.choose_model(name)
            click.echo(f"This is {self._model}." if name else ", ".join(one.name for one in self._gateway.list_models()))
        except AimGpuError as error:
            print_error(error.to_json())

    def _tell_of_wait(self) -> None:
        """A model that sleeps or still loads is silent for long: say so, and for how long."""
        with suppress(AimGpuError):  # what is wrong is reported by the message itself
            found = next((one for one in self._gateway.list_models() if one.name == self._model), None)
            if found is not None and found.state != "ready":
                click.secho(describe_wait(found), dim=True, err=True)


def describe_wait(model: ListedModel) -> str:
    """`waking code, about 30 s`."""
    doing = {"sleeping": "waking", "loading": "loading", "queued": "waiting for room for"}.get(model.state, "starting")
    return f"{doing} {model.name}" + (f", about {model.start_seconds} s" if model.start_seconds else "")


def _show(parts: Generator[str, None, str], kept: list[str], wrap: WordWrap | None) -> str:
    """Keeps each part and shows it as it comes; returns why the answer ended."""
    try:
        while True:
            part = next(parts)
            kept.append(part)
            if wrap is not None:
                wrap.write(part)
    except StopIteration as end:
        return str(end.value)
    finally:
        parts.close()
        if wrap is not None:
            wrap.finish()


def read_typed() -> Iterator[str]:
    """Lines of a terminal, which can be edited; Ctrl-C drops the line."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415 -- its import is what gives `input` arrows and a history

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /quit leaves.)", err=True)
            continue
        if text:
            yield text


def _daemon_url() -> str:
    record = find_home().read_daemon()
    if record is None:
        raise DaemonUnreachable(f"no daemon runs (looked in {find_home().path})", hint=start_hint())
    return record.url
