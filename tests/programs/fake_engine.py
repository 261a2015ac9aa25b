"""An engine without a model: real HTTP, OpenAI chat and completions, health, and whatever misbehaviour its flags ask for.

Usage: python fake_engine.py RUN_DIRECTORY [flags]. Writes endpoint.json into RUN_DIRECTORY when it listens, as llamacpp does.
From SIGUSR1 on it is mute: it runs and accepts connections, and answers nothing.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--garbage", action="store_true", help="print bytes that are no text, first")
    parser.add_argument("--say", action="append", default=[], help="print this line, first")
    parser.add_argument("--die-at-start", type=int, metavar="STATUS")
    parser.add_argument("--silent", action="store_true", help="run, but never listen")
    parser.add_argument("--never-ready", action="store_true", help="listen, and answer 503 to /health for ever")
    parser.add_argument("--mute", action="store_true", help="accept connections and never answer")
    parser.add_argument("--talk-nonsense", action="store_true", help="answer with something that is not HTTP")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--children", type=int, default=0, help="processes that only wait")
    parser.add_argument("--beside", help="a shell command that is run beside it, with its environment and an open stdin")
    parser.add_argument("--detached-children", type=int, default=0, help="the same, in sessions of their own")
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--slow-until", type=Path, metavar="FILE", help="of streams: once it is there, tokens take no time")
    parser.add_argument("--tokens", type=int, default=len(WORDS))
    parser.add_argument("--first-token-seconds", type=float, default=0.0)
    parser.add_argument("--crash-after", type=int, metavar="N", help="die without a word in the Nth chat request")
    parser.add_argument("--cut-stream-after", type=int, metavar="N", help="close the connection after N tokens, no [DONE]")
    parser.add_argument("--status", type=int, default=200, help="what chat requests are answered with")
    return parser.parse_args(arguments)


def tokens_text(served: int) -> str:
    """As llama-server has them."""
    counted = {"prompt_tokens_total": 3 * served, "tokens_predicted_total": 24 * served, "kv_cache_usage_ratio": 0.25}
    return "".join(f"llamacpp:{name} {value}\n" for name, value in counted.items())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: ClassVar[argparse.Namespace]
    key: ClassVar[str]
    ready_at: ClassVar[float]
    served: ClassVar[int] = 0
    counting: ClassVar[threading.Lock] = threading.Lock()

    def do_GET(self) -> None:
        if self._misbehaves():
            return
        if self.path == "/health":
            loading = self.options.never_ready or time.monotonic() < self.ready_at
            self._send(503 if loading else 200, {"status": "loading" if loading else "ok"})
        elif not self._allowed():
            self._send(401, {"error": {"message": "wrong key", "type": "authentication_error"}})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif self.path == "/metrics":
            self._send_text(f"llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n{tokens_text(Handler.served)}")
        elif self.path == "/served":
            self._send(200, {"served": Handler.served})
        else:
            self._send(404, {"error": {"message": "no such path", "type": "not_found_error"}})

    def do_POST(self) -> None:
        if self._misbehaves():
            return
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self._allowed():
            self._send(401, {"error": {"message": "wrong key", "type": "authentication_error"}})
            return
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            self._send(404, {"error": {"message": "no such path", "type": "not_found_error"}})
            return
        with self.counting:
            Handler.served += 1
            number = Handler.served
        if self.options.crash_after is not None and number >= self.options.crash_after:
            os._exit(86)
        if self.options.status != 200:
            self._send(self.options.status, {"error": {"message": "as asked", "type": "server_error"}})
            return
        time.sleep(self.options.first_token_seconds)
        self._answer(json.loads(raw))

    def _answer(self, content: dict[str, Any]) -> None:
        count = min(int(content.get("max_tokens") or self.options.tokens), self.options.tokens)
        words = [WORDS[index % len(WORDS)] + " " for index in range(count)]
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        if content.get("stream"):
            wants_usage = bool((content.get("stream_options") or {}).get("include_usage"))
            self._stream(str(content.get("model")), words, usage if wants_usage else None)
            return
        time.sleep(self.options.token_seconds * count)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if self.path == "/v1/completions":
            choice["text"] = "".join(words)
        else:
            choice["message"] = {"role": "assistant", "content": "".join(words)}
        self._send(
            200, {"id": "fake", "object": "chat.completion", "model": content.get("model"), "choices": [choice], "usage": usage}
        )

    def _stream(self, model: str, words: list[str], usage: dict[str, int] | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, word in enumerate(words):
            if self.options.cut_stream_after is not None and number >= self.options.cut_stream_after:
                self.close_connection = True
                return
            if self.options.slow_until is None or not self.options.slow_until.exists():
                time.sleep(self.options.token_seconds)
            delta = {"text": word} if self.path == "/v1/completions" else {"delta": {"content": word}}
            self._chunk({"id": "fake", "object": "chat.completion.chunk", "model": model, "choices": [{"index": 0, **delta}]})
        self._chunk({"id": "fake", "model": model, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if usage is not None:
            self._chunk({"id": "fake", "model": model, "choices": [], "usage": usage})
        self._raw_chunk(b"data: [DONE]\n\n")
        self._raw_chunk(b"")

    def _chunk(self, content: dict[str, Any]) -> None:
        self._raw_chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _raw_chunk(self, payload: bytes) -> None:
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
        self.wfile.flush()

    def _misbehaves(self) -> bool:
        if self.options.mute:
            threading.Event().wait()
        if self.options.talk_nonsense:
            self.wfile.write(b"\x00\xff not http at all\r\n\r\n")
            self.close_connection = True
            return True
        return False

    def _allowed(self) -> bool:
        return not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"

    def _send_text(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _send(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Quiet: a log is for what the flags ask to say."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are no news."""


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    if options.garbage:
        sys.stdout.buffer.write(random.Random(7).randbytes(2000) + b"\n\x1b[31mred\x1b[0m\n")
    for line in options.say:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if options.die_at_start is not None:
        return int(options.die_at_start)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait = [sys.executable, "-c", "import time; time.sleep(3600)"]
    children = [subprocess.Popen(wait) for _ in range(options.children)]
    children += [subprocess.Popen(wait, start_new_session=True) for _ in range(options.detached_children)]
    if options.beside is not None:
        children.append(subprocess.Popen(["/bin/sh", "-c", f"exec {options.beside}"], stdin=subprocess.PIPE))
    (options.run_directory / "children.json").write_text(json.dumps([child.pid for child in children]), encoding="utf-8")
    if options.silent:
        while True:
            time.sleep(3600)
    Handler.options = options
    signal.signal(signal.SIGUSR1, lambda *_: setattr(options, "mute", True))
    Handler.key = os.environ.get("AIMGPU_ENGINE_KEY", "")
    Handler.ready_at = time.monotonic() + options.load_seconds
    server = Server((options.host, options.port), Handler)
    part = options.run_directory / "endpoint.part"
    part.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}), encoding="utf-8")
    part.replace(options.run_directory / "endpoint.json")
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
