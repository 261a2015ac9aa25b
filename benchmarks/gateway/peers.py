"""How each gateway of the benchmark is started, and why one is left out where it is not installed."""

import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.ours import KEY

_NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; user {user};
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; keepalive_requests 100000000;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""
_LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{upstream}/v1", api_key: x}}
general_settings: {{master_key: {key}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    argv: tuple[str, ...]
    port: int
    header: str | None = None
    start_seconds: float = 30.0
    times_longer: float = 1.0  # to measure, where few requests fit into the usual time


def make_peers(upstream: int, folder: Path) -> tuple[list[Peer], dict[str, str]]:
    """Those that can run here, and for the others the reason why not."""
    peers, missing = [_ours(upstream), _bare(upstream)], {}
    for name, make in (("nginx", _nginx), ("vllm-router", _router), ("litellm", _litellm)):
        made = make(upstream, folder)
        if isinstance(made, Peer):
            peers.append(made)
        else:
            missing[name] = made
    return peers, missing


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ours(upstream: int) -> Peer:
    port = free_port()
    argv = (sys.executable, "-m", "benchmarks.gateway.ours", str(upstream), str(port))
    return Peer(name="aimgpu", argv=argv, port=port, header=f"authorization: Bearer {KEY}")


def make_before(upstream: int, checkout: Path) -> Peer:
    """Our gateway as another checkout has it, in this environment."""
    port = free_port()
    paths = f"PYTHONPATH={checkout / 'src'}{os.pathsep}{checkout}"
    module = "benchmarks.gateway.ours" if (checkout / "benchmarks/gateway/ours.py").exists() else "benchmarks.gateway_ours"
    argv = ("env", paths, sys.executable, "-P", "-m", module, str(upstream), str(port))
    return Peer(name="before", argv=argv, port=port, header=f"authorization: Bearer {KEY}")


def _bare(upstream: int) -> Peer:
    port = free_port()
    return Peer(
        name="bare-aiohttp", argv=(sys.executable, "-m", "benchmarks.gateway.bare", str(upstream), str(port)), port=port
    )


def _nginx(upstream: int, folder: Path) -> Peer | str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        return "nginx is not installed"
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, upstream=upstream, port=port, user="root"))
    return Peer(name="nginx", argv=(program, "-c", str(config), "-p", str(folder)), port=port)


def _router(upstream: int, folder: Path) -> Peer | str:  # noqa: ARG001  # one signature for all
    program = os.environ.get("AIMGPU_BENCH_VLLM_ROUTER")
    if program is None:
        return "set AIMGPU_BENCH_VLLM_ROUTER to the program of `pip install vllm-router`"
    port = free_port()
    argv = (program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{upstream}")
    return Peer(name="vllm-router", argv=(*argv, "--policy", "round_robin", "--prometheus-port", str(free_port())), port=port)


def _litellm(upstream: int, folder: Path) -> Peer | str:
    program = os.environ.get("AIMGPU_BENCH_LITELLM")
    if program is None:
        return "set AIMGPU_BENCH_LITELLM to the program of `pip install 'litellm[proxy]'`"
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM.format(upstream=upstream, key="sk-benchmark"))
    argv = (program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
    return Peer(
        name="litellm", argv=argv, port=port, header="authorization: Bearer sk-benchmark", start_seconds=180.0, times_longer=5.0
    )
