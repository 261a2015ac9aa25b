"""Questions to engines over loopback: whatever an engine does with the connection, the asker gets an answer or None."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.engines.causes import find_cause, parse_size
from aimgpu.engines.endpoint import ENDPOINT_NAME, choose_port, prepare_run_directory, write_endpoint, write_whole
from aimgpu.engines.health import Answer, ask, read_endpoint
from aimgpu.errors import EngineFailed

OK = b"HTTP/1.1 200 OK\r\n"
Behaviour = Callable[[socket.socket], None]


def says(*pieces: bytes) -> Behaviour:
    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)

    return act


@contextmanager
def engine(behaviour: Behaviour) -> Iterator[str]:
    """One connection on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                behaviour(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/health?deep=1"
        thread.join(10)


def test_an_answer_with_a_length_is_read_whole_though_it_comes_in_pieces() -> None:
    with engine(says(OK, b"Content-Le", b"ngth: 4\r\n\r\n", b"ab", b"cd")) as url:
        answer = ask(url)
    assert answer == Answer(status=200, body=b"abcd")


def test_a_chunked_answer_is_put_together() -> None:
    with engine(says(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"3\r\ncde\r\n0\r\n\r\n")) as url:
        answer = ask(url)
    assert answer is not None
    assert answer.body == b"abcde"


def test_the_end_of_the_connection_ends_a_body_without_a_length() -> None:
    with engine(says(b'HTTP/1.0 503 Loading\r\n\r\n{"status": "loading"}')) as url:
        answer = ask(url)
    assert answer is not None
    assert (answer.status, answer.read_json()) == (503, {"status": "loading"})


@pytest.mark.parametrize(
    "behaviour",
    [
        lambda _: None,
        says(b""),
        says(b"HTTP/1.1 200 OK\r\nContent-Type: te"),
        says(b"SSH-2.0-OpenSSH_9.2\r\n"),
        says(b"HTTP/9.9 200 OK\r\n\r\n"),
        says(b"\x00" * 64),
    ],
    ids=["closes at once", "says nothing", "is cut in its head", "is no HTTP", "is another HTTP", "is binary"],
)
def test_what_is_no_answer_is_none(behaviour: Behaviour) -> None:
    with engine(behaviour) as url:
        assert ask(url) is None


def test_an_engine_that_dribbles_does_not_hold_its_asker() -> None:
    released = threading.Event()

    def dribble(connection: socket.socket) -> None:
        connection.sendall(OK + b"Content-Length: 1000000\r\n\r\n")
        released.wait(10)

    with engine(dribble) as url:
        assert ask(url, bound_seconds=0.05) is None
        released.set()


def test_an_answer_without_end_is_cut() -> None:
    def flood(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(OK + b"\r\n")
        try:
            while True:
                connection.sendall(b"x" * 65536)
        except OSError:
            return

    with engine(flood) as url:
        answer = ask(url)
    assert answer is not None
    assert 256 * 1024 <= len(answer.body) < 512 * 1024


def test_a_question_carries_its_path_key_and_content() -> None:
    seen: list[bytes] = []

    def note(connection: socket.socket) -> None:
        while b"\r\n\r\n" not in b"".join(seen) or not seen[-1].endswith(b"}"):
            seen.append(connection.recv(65536))
        connection.sendall(OK + b"Content-Length: 0\r\n\r\n")

    with engine(note) as url:
        assert ask(url, api_key="k3y", content={"prompt": "größer"}) == Answer(status=200, body=b"")
    head, _, body = b"".join(seen).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /health?deep=1 HTTP/1.1"
    assert "Authorization: Bearer k3y" in lines
    assert f"Content-Length: {len(body)}" in lines
    assert json.loads(body) == {"prompt": "größer"}


def test_where_nobody_listens_there_is_no_answer() -> None:
    assert ask(f"http://127.0.0.1:{choose_port()}/health") is None


@pytest.mark.parametrize("body", [b"", b"[1]", b"null", b"{", b"\xff\xfe", b'"text"'])
def test_a_body_that_is_no_object_reads_as_none(body: bytes) -> None:
    assert Answer(status=200, body=body).read_json() is None


@pytest.mark.parametrize(
    ("content", "url"),
    [
        ('{"url": "http://127.0.0.1:8000"}', "http://127.0.0.1:8000"),
        ('{"url": null, "state": "loading"}', None),
        ('{"state": "loading", "pid": 3}', None),
    ],
)
def test_an_endpoint_file_says_where_or_not_yet(tmp_path: Path, content: str, url: str | None) -> None:
    (tmp_path / "endpoint.json").write_text(content)
    found = read_endpoint(tmp_path / "endpoint.json")
    assert found is not None
    assert found.url == url


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        '{"url": "https://127.0.0.1:1"}',
        '{"url": "http://127.0.0.1"}',
        '{"url": "file:///etc"}',
        '{"url": 7}',
    ],
)
def test_an_endpoint_file_that_makes_no_sense_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "endpoint.json").write_text(content)
    assert read_endpoint(tmp_path / "endpoint.json") is None


def test_a_missing_endpoint_file_is_none(tmp_path: Path) -> None:
    assert read_endpoint(tmp_path / "endpoint.json") is None


def test_a_run_begins_without_what_the_run_before_said(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "chat-0"
    prepare_run_directory(folder)
    assert folder.stat().st_mode & 0o077 == 0
    url = write_endpoint(folder, 8123)
    (folder / "sleeps").write_text("x")
    (folder / "engine.log").write_text("kept")
    found = read_endpoint(folder / ENDPOINT_NAME)
    assert found is not None
    assert found.url == url == "http://127.0.0.1:8123"
    prepare_run_directory(folder, "sleeps", "never-there")
    assert [one.name for one in folder.iterdir()] == ["engine.log"]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineFailed, match=r"endpoint\.json") as caught:
        write_whole(tmp_path / "file" / "endpoint.json", {})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32.00 MiB", 32 << 20),
        ("0 bytes", 0),
        ("1.5 GiB", 3 << 29),
        ("7 B", 7),
        ("2 TiB", 2 << 40),
        ("12", 0),
        ("12 MB", 0),
        ("MiB", 0),
        ("", 0),
        ("nan MiB", 0),
        ("inf GiB", 0),
    ],
)
def test_sizes_as_engines_print_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.lists(st.text(max_size=40), max_size=12))
def test_the_cause_that_stands_first_in_the_table_wins_wherever_it_is_in_the_log(noise: list[str]) -> None:
    causes = {"first, {0}": r"A=(\d+)", "second": r"B="}
    lines = [*(line for line in noise if "=" not in line), "B=2", "x A=1", "A=9"]
    assert find_cause(lines, causes) == "first, 1"
    assert find_cause(lines[:-2], causes) == "second"
    assert find_cause(lines[:-3], causes) is None
