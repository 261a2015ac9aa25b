"""`aimgpu chat` at a terminal and in a pipe: what ends an answer, what a line with / does, what a sleeping model says."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aimgpu.cli.commands.serve.chat import UNWATCHED_TOKENS, Conversation, describe_wait, read_typed
from aimgpu.cli.gateway_client import GatewayClient, ListedModel
from aimgpu.cli.views.word_wrap import WordWrap

ENTER, END = b"\r", b"\x04"


class Talker(ThreadingHTTPServer):
    """Answers "Hello there", and goes no further while `holds` says so and the caller listens."""

    daemon_threads = True
    models: list[dict[str, Any]]
    asked: list[Any]
    released: threading.Event
    finish = "stop"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Talker

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": self.server.models}).encode())

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()
        self._event({"delta": {"content": "Hello "}})
        self.server.released.wait()
        self._event({"delta": {"content": "there"}, "finish_reason": self.server.finish})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, choice: object) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def talker() -> Iterator[Talker]:
    with Talker(("127.0.0.1", 0), _Handler) as server:
        server.models, server.asked, server.released = [{"id": "code", "state": "ready"}, {"id": "tiny"}], [], threading.Event()
        server.released.set()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


class Terminal:
    """A terminal with `aimgpu chat` in it."""

    def __init__(self, url: str) -> None:
        self._file, its = pty.openpty()
        command = [sys.executable, "-m", "aimgpu", "chat", "--url", url]
        self._process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "dumb"})
        os.close(its)
        self._shown = b""

    def type(self, data: bytes) -> None:
        os.write(self._file, data)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def read_until(self, text: str) -> str:
        """What was shown up to there; the terminal's end is an error."""
        wanted = text.encode()
        while wanted not in self._shown:
            self._shown += os.read(self._file, 4096)
        before, _, self._shown = self._shown.partition(wanted)
        return before.decode()

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._file)


@pytest.fixture
def terminal(talker: Talker) -> Iterator[Terminal]:
    found = Terminal(talker.url)
    yield found
    found.close()


def test_ctrl_c_stops_the_answer_and_not_the_chat(talker: Talker, terminal: Terminal) -> None:
    talker.released.clear()
    terminal.read_until("> ")
    terminal.type(b"hi" + ENTER)
    terminal.read_until("Hello")
    terminal.interrupt()
    terminal.read_until("(stopped)")
    terminal.read_until("> ")
    talker.released.set()
    terminal.type(b"again" + ENTER)
    terminal.read_until("Hello there")
    terminal.read_until("> ")
    terminal.type(END)
    assert terminal.wait() == 0
    assert [message["content"] for message in talker.asked[1]["messages"]] == ["hi", "Hello ", "again"]


def test_a_line_with_a_slash_is_a_command_and_never_a_message(talker: Talker, terminal: Terminal) -> None:
    terminal.read_until("> ")
    terminal.type(b"/nope" + ENTER)
    terminal.read_until("There is no /nope")
    terminal.read_until("/model NAME")
    terminal.read_until("> ")
    terminal.type(b"/model tiny" + ENTER)
    terminal.read_until("This is tiny.")
    terminal.type(b"/quit" + ENTER)
    assert terminal.wait() == 0
    assert talker.asked == []


def test_ctrl_c_at_the_prompt_drops_the_line_and_says_how_to_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: Iterator[str | type[BaseException]] = iter([KeyboardInterrupt, "hi", EOFError])

    def read_line(_prompt: str) -> str:
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    monkeypatch.setattr("builtins.input", read_line)
    assert list(read_typed()) == ["hi"]
    assert "(Ctrl-D or /quit leaves.)" in capsys.readouterr().err


def converse(talker: Talker, text: str, *, max_tokens: int | None = None) -> None:
    gateway = GatewayClient(talker.url, None)
    Conversation(gateway, "code", system=None, max_tokens=max_tokens, as_json=False).say(text)


def test_an_answer_that_nobody_can_stop_is_bounded(talker: Talker, capsys: pytest.CaptureFixture[str]) -> None:
    talker.finish = "length"
    converse(talker, "hi")
    assert talker.asked[0]["max_tokens"] == UNWATCHED_TOKENS
    assert "--max-tokens sets the limit" in capsys.readouterr().err
    converse(talker, "hi", max_tokens=7)
    assert talker.asked[1]["max_tokens"] == 7


def test_a_model_that_sleeps_is_named_with_how_long_it_takes(talker: Talker, capsys: pytest.CaptureFixture[str]) -> None:
    talker.models[0] |= {"state": "sleeping", "start_seconds": 30}
    converse(talker, "hi")
    out, err = capsys.readouterr()
    assert (out, err) == ("Hello there\n", "waking code, about 30 s\n")


def test_a_wait_of_unknown_length_is_named_without_one() -> None:
    assert describe_wait(ListedModel("code", state="loading")) == "loading code"


def test_words_are_kept_whole_at_the_edge_and_code_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    wrap = WordWrap(columns=20)
    for part in ("one two thr", "ee four five s", "ix\n```\nx = [1, 2, 3, 4, 5, 6, 7]\n", "```\nseven"):
        wrap.write(part)
    wrap.finish()
    assert capsys.readouterr().out == "one two three four\nfive six\n```\nx = [1, 2, 3, 4, 5, 6, 7]\n```\nseven\n"


def test_what_goes_to_a_pipe_is_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    wrap = WordWrap()
    wrap.write("one  two ")
    wrap.finish()
    assert capsys.readouterr().out == "one  two \n"
