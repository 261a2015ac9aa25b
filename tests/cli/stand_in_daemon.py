"""A program that speaks the daemon's side of the control API, with the outcome that STAND_IN_SCENARIO names.

It is run in place of `aimgpu.daemon.assembly`: real process, real socket, real files in its home; no GPU, no engine.
"""

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from aimgpu.home import DaemonRecord, Home
from aimgpu.procfs import read_boot_id, read_start_ticks

SCENARIO = os.environ.get("STAND_IN_SCENARIO", "ok")
TOKEN = "stand-in-token"
LOOKS_OF_A_START = 3  # `up` asks for the status when the daemon answers, before and after the apply
REASONS = [{"node": "here", "device": "sim-mi300x-0", "code": "memory", "text": "192GiB, 12GiB free, 99TiB asked for"}]
REFUSAL = {"ask": "chat-0", "summary": "no Device has 99TiB free", "reasons": REASONS, "would_fit": ["Ask for 12GiB or less."]}


class State:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.url = ""
        self.instances: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[str]] = {}
        self.applied: list[dict[str, Any]] = []
        self.looks = 0
        self.stopping = threading.Event()

    def status(self) -> dict[str, Any]:
        return {
            "simulated": True,
            "version": "0",
            "pid": os.getpid(),
            "gpus": [self.gpu(index) for index in range(self.arguments.count)],
            "deployments": [{"name": name, "replicas": 1} for name in self.instances],
            "instances": list(self.instances.values()),
            "models_url": f"{self.url}/v1",
            "page_url": f"{self.url}/",
        }

    def gpu(self, index: int) -> dict[str, Any]:
        part = self.arguments.simulate or "MI300X"
        return {"id": f"sim-mi300x-{index}", "index": index, "product": part, "simulated": True}

    def instance(self, name: str, model: str, state: str) -> dict[str, Any]:
        failed = state == "failed"
        return {
            "id": f"{name}-0-abc",
            "name": name,
            "model": model,
            "engine": "llamacpp",
            "launcher": "process",
            "device": "sim-mi300x-0",
            "device_name": "MI300X",
            "partition": "sim-mi300x-0/spx-0",
            "memory_bytes": 2 << 30,
            "level": "none",
            "state": state,
            "percent": None,
            "reason": "the engine ended before it was ready" if failed else None,
            "last_lines": ["cannot load", "giving up"] if failed else [],
            "endpoint": None if failed else f"{self.url}/v1",
            "priority": "medium",
            "replica": 0,
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        print(format % args, flush=True)  # noqa: T201

    def do_GET(self) -> None:
        if not self.allowed():
            return
        url = urlsplit(self.path)
        if url.path == "/api/v1/status":
            self.state.looks += 1
            if SCENARIO == "fail-later" and self.state.looks > LOOKS_OF_A_START:
                self.state.instances["chat"] = self.state.instance("chat", "m", "failed")
            if SCENARIO == "down-later" and self.state.looks > LOOKS_OF_A_START:
                self.state.instances.clear()
            self.answer(200, self.state.status())
        elif url.path.endswith("/log"):
            self.stream_log(url.path.split("/")[4], int(parse_qs(url.query)["lines"][0]))
        else:
            self.answer(404, {"error": {"code": "not_found", "message": "no such path", "hint": None}})

    def do_POST(self) -> None:
        if not self.allowed():
            return
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        url = urlsplit(self.path)
        if url.path == "/api/v1/apply":
            flags = {name: values == ["1"] for name, values in parse_qs(url.query).items()}
            self.apply(body, dry_run=flags["dry_run"], prune=flags["prune"])
        elif url.path == "/api/v1/release":
            self.release(body["names"])
        elif url.path == "/api/v1/links":
            self.answer(200, {"url": f"{self.state.url}/link/code", "seconds": 3600})
        elif url.path == "/api/v1/stop":
            self.answer(200, {"released": list(self.state.instances)})
            self.state.stopping.set()

    def allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer(403, {"error": {"code": "not_allowed", "message": "wrong token", "hint": "Use the token file."}})
        return False

    def apply(self, body: dict[str, Any], *, dry_run: bool, prune: bool) -> None:
        self.state.applied.append(body)
        self.start_stream("application/x-ndjson")
        models = yaml.safe_load(body["stack"])["models"]
        steps = [{"kind": "deploy", "deployment": n, "replica": 0, "text": f"start {n}", "slots": []} for n in models]
        others = [name for name in self.state.instances if name not in models]
        if prune:
            steps += [{"kind": "release", "deployment": name, "replica": 0, "text": f"stop {name}"} for name in others]
        if SCENARIO == "refuse":
            self.event("plan", steps=[], refusals=[REFUSAL], unchanged=[])
        elif SCENARIO == "error":
            self.event("error", code="model_unavailable", message="cannot download m", hint="Check the network.")
        elif SCENARIO == "break":
            self.event("plan", steps=steps, refusals=[], unchanged=[])
            self.close_connection = True
            return
        else:
            self.event("plan", steps=steps, refusals=[], unchanged=[], beside=[] if prune else others)
            if not dry_run:
                for name in others if prune else ():
                    del self.state.instances[name]
                self.deploy(models)
        self.event("done")
        self.end_stream()

    def deploy(self, models: dict[str, Any]) -> None:
        for done in (0, 50, 100):
            self.event("progress", what="m", done_bytes=done << 20, total_bytes=100 << 20)
        for position, (name, fields) in enumerate(models.items()):
            failed = SCENARIO == "fail-all" or (SCENARIO == "fail-one" and position == 0)
            final = self.state.instance(name, fields["model"], "failed" if failed else "ready")
            self.event("state", deployment=name, instance=final["id"], state="loading", percent=None)
            self.event("state", deployment=name, **{"instance": final["id"], **final})
            self.state.instances[name] = final
            self.state.logs[final["id"]] = [f"{name} line {number}" for number in range(5)]

    def release(self, names: list[str]) -> None:
        unknown = [name for name in names if name not in self.state.instances]
        if unknown:
            error = {"code": "unknown_deployment", "message": f"no deployment {unknown[0]}", "hint": "Running: chat."}
            self.answer(404, {"error": error})
            return
        for name in names:
            del self.state.instances[name]
        self.answer(200, {"released": names})

    def stream_log(self, instance_id: str, lines: int) -> None:
        self.start_stream("text/plain")
        for line in self.state.logs[instance_id][-lines:] if lines else []:
            self.chunk(f"{line}\n".encode())
        self.end_stream()

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, kind: str, **data: object) -> None:
        self.chunk(json.dumps({"event": kind, **data}).encode() + b"\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.chunk(b"")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--secrets-on-stdin", action="store_true")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--simulate")
    parser.add_argument("--count", type=int, default=1)
    arguments = parser.parse_args()
    if SCENARIO == "owned":
        error = {"code": "ledger_owned", "message": "another daemon owns the ledger (pid 1)", "hint": "Stop it first."}
        print(json.dumps({"event": "daemon.start_failed", "error": error}), file=sys.stderr)  # noqa: T201
        return 6
    if SCENARIO == "crash":
        raise RuntimeError("stand-in crashed")
    state = State(arguments)
    server = ThreadingHTTPServer((arguments.host, arguments.port), type("Bound", (Handler,), {"state": state}))
    state.url = f"http://{arguments.host}:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = Home(arguments.home)
    home.token_file.write_text(TOKEN)
    home.write_daemon(
        DaemonRecord(
            pid=os.getpid(),
            start_ticks=read_start_ticks(os.getpid()) or 0,
            boot_id=read_boot_id(),
            host=arguments.host,
            port=server.server_port,
            url=state.url,
        )
    )
    state.stopping.wait()
    server.shutdown()
    home.daemon_file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
