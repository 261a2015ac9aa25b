"""A stand-in for `ollama`: `serve`, `--version`, its variables, its HTTP paths and its ways to fail.

FAKE_OLLAMA holds words: oom (the model does not load), unknown (the registry has no such model), slow-pull, port-taken.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from tests.programs import fake_engine

VERSION = "0.12.3"
OUT_OF_MEMORY = "llama runner process has terminated: cudaMalloc failed: out of memory"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    words: ClassVar[frozenset[str]]
    store: ClassVar[set[str]] = set()
    loaded: ClassVar[dict[str, int]] = {}
    slow: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/api/version":
            self._send(200, {"version": VERSION})
        elif self.path == "/api/ps":
            names = [name if ":" in name else f"{name}:latest" for name in self.loaded]
            self._send(200, {"models": [{"name": name, "model": name, "expires_at": "2318"} for name in names]})
        elif self.path == "/api/tags":
            self._send(200, {"models": [{"name": name} for name in sorted(self.store)]})
        else:
            self._send(404, {"error": "not found"})

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if self.path == "/api/pull":
            self._pull(content["model"])
        elif self.path == "/api/show":
            self._found(content["model"])
        elif self.path == "/api/copy":
            if self._found(content["source"]):
                self.store.add(content["destination"])
        elif self.path == "/api/generate":
            self._generate(content)
        else:
            self._send(404, {"error": "not found"})

    def _found(self, model: str) -> bool:
        found = model in self.store
        self._send(200 if found else 404, {} if found else {"error": f"model '{model}' not found"})
        return found

    def _pull(self, model: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event({"status": "pulling manifest"})
        if "unknown" in self.words:
            self._event({"error": "pull model manifest: file does not exist"})
            return
        self._event({"status": "pulling 1234", "digest": "sha256:1234", "total": 200, "completed": 84})
        if "slow-pull" in self.words:
            self.slow.wait()
        self._event({"status": "success"})
        self.store.add(model)

    def _generate(self, content: dict[str, Any]) -> None:
        model = content["model"]
        if model not in self.store:
            self._send(404, {"error": f"model '{model}' not found"})
        elif "oom" in self.words:
            self._send(500, {"error": OUT_OF_MEMORY})
        else:
            if content.get("keep_alive") == 0:
                self.loaded.pop(model, None)
            else:
                others = [name for name in self.loaded if name != model]
                for name in others[: max(0, len(others) + 1 - int(os.environ.get("OLLAMA_MAX_LOADED_MODELS") or 3))]:
                    del self.loaded[name]
                self.loaded[model] = content.get("keep_alive", 300)
            self._send(200, {"model": model, "response": "one", "done": True})

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(content).encode() + b"\n")
        self.wfile.flush()
        self.close_connection = True

    def _send(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Quiet."""


def main(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        sys.stdout.write(f"Warning: could not connect to a running Ollama instance\nollama version is {VERSION}\n")
        return 0
    if arguments != ["serve"]:
        sys.stderr.write(f'Error: unknown command "{" ".join(arguments)}" for "ollama"\n')
        return 1
    host, port = os.environ.get("OLLAMA_HOST", "127.0.0.1:11434").split(":")
    Handler.words = frozenset(os.environ.get("FAKE_OLLAMA", "").split())
    if os.getpid() == 1:  # of a container, where signals without a handler are ignored
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    if "port-taken" in Handler.words:
        sys.stderr.write(f"Error: listen tcp {host}:{port}: bind: address already in use\n")
        return 1
    sys.stderr.write(f'time=2026-01-21T16:45:51.423Z level=INFO source=routes.go:1259 msg="Listening on {host}:{port}"\n')
    fake_engine.Server((host, int(port)), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
