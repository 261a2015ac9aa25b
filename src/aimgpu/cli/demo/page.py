"""The demo as it runs, for a browser on this machine: which scene plays, what came out, and what the meter reads now."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aimgpu.cli.demo.manager import DemoManager
from aimgpu.cli.demo.scenes import Scene, SceneResult
from aimgpu.errors import AimGpuError

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>aimgpu demo</title>
<meta name="viewport" content="width=device-width">
<style>body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}h2{font-size:1.1em;margin:1.2em 0 0}
progress{width:100%}.broken{color:#b00020}.held{color:#0a6b2b}</style><main><h1>aimgpu demo</h1><p id="gpu"></p>
<label for="used">Memory in use, by the meter: <span id="bytes"></span></label><progress id="used"></progress>
<div id="scenes" aria-live="polite"></div></main><script>
const text=(id,t)=>document.getElementById(id).textContent=t;
async function look(){try{const s=await(await fetch("state")).json();text("gpu",s.gpu);
const bar=document.getElementById("used");bar.max=s.memory_bytes||1;bar.value=s.used_bytes||0;
const gib=b=>(b/2**30).toFixed(2);
text("bytes",s.used_bytes===null?"unknown":gib(s.used_bytes)+" of "+gib(s.memory_bytes)+" GiB, "+s.processes+" processes");
const made=(tag,t,kind)=>{const e=document.createElement(tag);e.textContent=t;e.className=kind;return e};
document.getElementById("scenes").replaceChildren(...s.scenes.flatMap(one=>
[made("h2",one.title+": "+one.state,one.state),...one.lines.map(line=>made("div",line,""))]));
setTimeout(look,500)}catch{text("gpu","The demo has ended; this is what it showed last.")}}look()</script></html>"""


class DemoPage:
    """Serves what the demo is doing on a loopback port, until it is closed. It changes nothing."""

    def __init__(self, manager: DemoManager, gpu: str, scenes: list[Scene]) -> None:
        self._manager, self._gpu = manager, gpu
        self._scenes: dict[str, dict[str, Any]] = {
            scene.name: {"title": scene.title, "state": "to come", "lines": ()} for scene in scenes
        }
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.state))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def begins(self, scene: Scene) -> None:
        """It plays now."""
        self._scenes[scene.name]["state"] = "plays"

    def ended(self, scene: Scene, result: SceneResult) -> None:
        """What came out."""
        self._scenes[scene.name] |= {"state": result.verdict.value, "lines": result.lines}

    def state(self) -> dict[str, Any]:
        """As the page shows it; the meter is read now."""
        told: dict[str, Any] = {"gpu": self._gpu, "scenes": list(self._scenes.values())}
        try:
            usage = asdict(self._manager.usage())
            device = self._manager.device()
        except (AimGpuError, OSError, StopIteration):  # between two layouts
            return told | {"used_bytes": None, "memory_bytes": 0, "processes": 0}
        memory = sum(partition.memory_bytes for partition in device.layout.partitions)
        return told | {"used_bytes": usage["used_bytes"], "memory_bytes": memory, "processes": len(usage["processes"])}

    def close(self) -> None:
        """Nobody is answered any more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(state: Callable[[], dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            port = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):  # another site's page asks
                self.send_error(403)
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", _PAGE)
            elif self.path == "/state":
                self._answer("application/json", json.dumps(state()))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 as the base class has it
            """Nothing: the terminal shows the scenes."""

    return Handler
